"""Models for one device: ViT from 0.3M to 32B parameters, a small ResNet, and other people's. Without parallelism."""

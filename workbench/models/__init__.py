"""Models for one device: ViT from 0.2M to 32B parameters, a small ResNet, and other people's. Without parallelism."""

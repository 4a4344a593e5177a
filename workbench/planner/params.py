"""How many parameters our ViT has: exact, and checked against the built model."""

from workbench.models.config import VitConfig


def num_parameters(vit: VitConfig) -> int:
    """Every trained value. d width, f MLP width: a layer has 4d² + 2df + 9d + f, biases and norms included.

    Matrices 4d² + 2df; their biases 3d + d + f + d; two norms 4d. QK-norm adds 4 · head_dim a layer.
    """
    d, f = vit.width, vit.mlp_width
    layer = 4 * d * d + 2 * d * f + 9 * d + f + (4 * vit.head_dim if vit.qk_norm else 0)
    patches = vit.in_channels * vit.patch_size**2 * d + d
    embeddings = d * (1 + vit.registers + vit.num_patches + 1)
    return vit.depth * layer + patches + embeddings + 2 * d + d * vit.num_classes + vit.num_classes


def cast_parameters(vit: VitConfig) -> int:
    """Those that autocast converts to half precision: of the linear layers and the patch embedding, not norms and embeddings."""
    d, f = vit.width, vit.mlp_width
    layer = 4 * d * d + 2 * d * f + 5 * d + f
    return vit.depth * layer + vit.in_channels * vit.patch_size**2 * d + d + d * vit.num_classes + vit.num_classes


def num_tensors(vit: VitConfig) -> int:
    """Parameter tensors: what a single-tensor optimizer loops over."""
    return vit.depth * (12 + (4 if vit.qk_norm else 0)) + 8 + (1 if vit.registers else 0)

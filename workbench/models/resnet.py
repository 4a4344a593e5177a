"""A small residual network (He et al. 2016) with the usual layer names, for small images and for the stability case."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        return F.relu(self.bn2(self.conv2(y_BCHW)) + self.downsample(x_BCHW))


class ResNet(nn.Module):
    """Four stages of one basic block. Downsampling stops where the image would become smaller than 2 × 2."""

    def __init__(self, *, num_classes: int, in_channels: int, image_size: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels, size = width, image_size
        for number in range(1, 5):
            out = width * 2 ** (number - 1)
            stride = 2 if number > 1 and size >= 4 else 1
            size //= stride
            self.add_module(f"layer{number}", BasicBlock(channels, out, stride))
            channels = out
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        for number in range(1, 5):
            x_BCHW = self.get_submodule(f"layer{number}")(x_BCHW)
        return self.fc(x_BCHW.mean(dim=(2, 3)))


def badly_initialised(
    *, num_classes: int, in_channels: int, image_size: int, width: int = 4, gain: float = 1.0
) -> ResNet:
    """A planted fault: a ``ResNet`` whose ``layer4.conv1`` starts ``gain`` times as large as Kaiming initialisation has it.

    The batch norm behind it divides the gain out again, so that the network computes the same and learns as well, until an
    output of that convolution no longer fits its number format. A gain of 1 is the healthy network.
    """
    model = ResNet(num_classes=num_classes, in_channels=in_channels, image_size=image_size, width=width)
    with torch.no_grad():
        model.get_parameter("layer4.conv1.weight").mul_(gain)
    return model

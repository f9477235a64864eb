"""AlexNet, VGG-16 and MNASNet 0.5, layer by layer as everybody knows them (those of torchvision)."""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"; 61.1 M parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(3, 64, 11, stride=4, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(64, 192, 5, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(192, 384, 3, padding=1),
            *_convolution(384, 256, 3, padding=1),
            *_convolution(256, 256, 3, padding=1),
            nn.MaxPool2d(3, 2),
        )
        self.pool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 3, 224, 224) to logits (batch, classes)."""
        logits: Tensor = self.classifier(self.pool(self.features(pixels)).flatten(1))
        return logits


class VGG16(nn.Module):
    """Simonyan and Zisserman 2014, configuration D, without batch normalisation; 138.4 M parameters."""

    WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for stage in self.WIDTHS:
            for wider in stage:
                layers += _convolution(width, wider, 3, padding=1)
                width = wider
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 3, 224, 224) to logits (batch, classes)."""
        logits: Tensor = self.classifier(self.pool(self.features(pixels)).flatten(1))
        return logits


class MNASNet(nn.Module):
    """Tan and others 2018, MNASNet-B1 at half width; 2.2 M parameters."""

    STACKS = (
        (16, 3, 2, 3, 3),
        (24, 5, 2, 3, 3),
        (40, 5, 2, 6, 3),
        (48, 3, 1, 6, 2),
        (96, 5, 2, 6, 4),
        (160, 3, 1, 6, 1),
    )
    """Width, kernel, stride of the first, expansion and number of the blocks of each stack."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers = [
            *_normalised(3, 16, 3, stride=2),
            *_normalised(16, 16, 3, groups=16),
            *_normalised(16, 8, 1, active=False),
        ]
        width = 8
        for wider, kernel, stride, expansion, count in self.STACKS:
            layers.append(InvertedResidual(width, wider, kernel, stride, expansion))
            layers += [InvertedResidual(wider, wider, kernel, 1, expansion) for _ in range(count - 1)]
            width = wider
        self.layers = nn.Sequential(*layers, *_normalised(width, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(1280, classes))

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 3, 224, 224) to logits (batch, classes)."""
        logits: Tensor = self.classifier(self.layers(pixels).mean([2, 3]))
        return logits


class InvertedResidual(nn.Module):
    """Expand, convolve each channel by itself, project; with a shortcut where the shape stays."""

    def __init__(self, width: int, wider: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = width * expansion
        self.shortcut = width == wider and stride == 1
        self.layers = nn.Sequential(
            *_normalised(width, inner, 1),
            *_normalised(inner, inner, kernel, stride=stride, groups=inner),
            *_normalised(inner, wider, 1, active=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) to (batch, wider, h / stride, w / stride)."""
        y: Tensor = self.layers(x)
        return y + x if self.shortcut else y


def _convolution(width: int, wider: int, kernel: int, *, stride: int = 1, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(width, wider, kernel, stride, padding), nn.ReLU(inplace=True)]


def _normalised(
    width: int, wider: int, kernel: int, *, stride: int = 1, groups: int = 1, active: bool = True
) -> list[nn.Module]:
    convolution = nn.Conv2d(width, wider, kernel, stride, kernel // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(wider, momentum=0.0003)
    return [convolution, norm, nn.ReLU(inplace=True)] if active else [convolution, norm]

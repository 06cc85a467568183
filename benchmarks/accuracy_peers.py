"""The peers of benchmarks/accuracy.py: small ConvNets and ViTs in torch, each with a sound recipe for few minutes.

All of them: AdamW (decay on matrices and convolutions alone), one cycle, random crop with mirrored borders, mixup,
label smoothing, mirrored images where ours mirrors them; the last weights are scored.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import benchmarks.torch_peers  # noqa: F401, first: it makes the next imports work

# ruff: isort: off
import timm
from vit_pytorch.cct import CCT
from vit_pytorch.vit_for_small_dataset import ViT as SmallDatasetViT

from smallvit.data import Dataset

MIXUP = 0.2  # alpha
SMOOTHING = 0.1


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Basic(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv(inputs, outputs, stride), conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, stride, size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR's ResNet; from 64 pixels on its first convolution has stride 2."""

    def __init__(self, size: int, classes: int, widths: tuple[int, ...], depth: int, channels: int) -> None:
        super().__init__()
        blocks, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(depth):
                blocks.append(Basic(inputs, width, 2 if stage and not block else 1))
                inputs = width
        stem = nn.Sequential(conv(channels, widths[0], 2 if size >= 64 else 1), nn.ReLU())
        self.layers = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ResNet9(nn.Module):
    """The net of the CIFAR-10 speed runs: eight convolutions, two shortcuts, max pooling."""

    def __init__(self, size: int, classes: int, channels: int, width: int = 64) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(conv(inputs, outputs, stride), nn.ReLU())

        w = width
        self.stem = layer(channels, w, 2 if size >= 64 else 1)
        self.one = nn.Sequential(layer(w, 2 * w), nn.MaxPool2d(2))
        self.res_one = nn.Sequential(layer(2 * w, 2 * w), layer(2 * w, 2 * w))
        self.two = nn.Sequential(layer(2 * w, 4 * w), nn.MaxPool2d(2))
        self.three = nn.Sequential(layer(4 * w, 8 * w), nn.MaxPool2d(2))
        self.res_three = nn.Sequential(layer(8 * w, 8 * w), layer(8 * w, 8 * w))
        self.head = nn.Linear(8 * w, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(self.stem(x))
        x = self.three(self.two(x + self.res_one(x)))
        x = x + self.res_three(x)
        return 0.125 * self.head(x.amax((2, 3)))


def small_dataset_vit(size: int, classes: int, channels: int) -> nn.Module:
    """The paper's sizes, in vit-pytorch's implementation."""
    return SmallDatasetViT(
        image_size=size,
        patch_size=size // 8,
        num_classes=classes,
        dim=192,
        depth=9,
        heads=12,
        mlp_dim=384,
        dim_head=16,
        channels=channels,
    )


def cct(size: int, classes: int, channels: int) -> nn.Module:
    """CCT-2/3x2; a third convolution from 64 pixels on, so that there are 64 tokens again."""
    return CCT(
        img_size=size,
        embedding_dim=128,
        n_input_channels=channels,
        n_conv_layers=2 if size < 64 else 3,
        kernel_size=3,
        stride=1,
        padding=1,
        pooling_kernel_size=3,
        pooling_stride=2,
        pooling_padding=1,
        num_layers=2,
        num_heads=2,
        mlp_ratio=1.0,
        num_classes=classes,
        positional_embedding="learnable",
    )


def vit_tiny(size: int, classes: int, channels: int) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=size,
        patch_size=max(size // 8, 1),
        num_classes=classes,
        in_chans=channels,
    )


@dataclass(frozen=True)
class Peer:
    make: Callable[[int, int, int], nn.Module]  # image size, classes, channels
    learning_rate: float
    weight_decay: float = 0.05
    batch_size: int = 64


PEERS: dict[str, Peer] = {
    "resnet20": Peer(lambda s, k, c: ResNet(s, k, (16, 32, 64), 3, c), 5e-3),
    "resnet20x2": Peer(lambda s, k, c: ResNet(s, k, (32, 64, 128), 3, c), 3e-3),
    "resnet18": Peer(lambda s, k, c: ResNet(s, k, (64, 128, 256, 512), 2, c), 2e-3),
    "resnet9": Peer(lambda s, k, c: ResNet9(s, k, c), 2e-3),
    "resnet9_half": Peer(lambda s, k, c: ResNet9(s, k, c, width=32), 3e-3),
    "resnet9_narrow": Peer(lambda s, k, c: ResNet9(s, k, c, width=16), 5e-3),
    "vit_pytorch_small_dataset": Peer(small_dataset_vit, 1e-3),
    "vit_pytorch_cct_2": Peer(cct, 2e-3),
    "timm_vit_tiny": Peer(vit_tiny, 5e-4),
}


def crop_and_flip(x: np.ndarray, random: np.random.Generator, *, flip: bool = True) -> np.ndarray:
    """Random crops with mirrored borders of an eighth, and flips."""
    height, width = x.shape[1:3]
    pad = max(1, round(height / 8))
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    tops, lefts = random.integers(0, 2 * pad + 1, (2, len(x)))
    x = np.stack([image[t : t + height, s : s + width] for image, t, s in zip(x, tops, lefts, strict=True)])
    if flip:
        mirrored = random.random(len(x)) < 0.5
        x[mirrored] = x[mirrored, :, ::-1]
    return x


class Run:
    """A peer on a data set: `step` trains on one batch, `score` is its accuracy on the test images, in percent."""

    def __init__(
        self, name: str, data: Dataset, steps: int, seed: int, flip: bool, learning_rate: float | None
    ) -> None:
        peer = PEERS[name]
        torch.manual_seed(seed)
        self.data, self.flip, self.batch_size = data, flip, min(peer.batch_size, len(data.train))
        preprocess = data.preprocess
        self.model = peer.make(preprocess.size[0], len(data.classes), preprocess.channels)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        rate = learning_rate or peer.learning_rate
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": peer.weight_decay}, {"params": others, "weight_decay": 0.0}], lr=rate
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, rate, max(steps, 4), pct_start=0.2, div_factor=10, final_div_factor=1000
        )
        self.random = np.random.default_rng(seed)
        self.order = np.zeros(0, np.int64)

    def images(self, images: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.data.preprocess.normalise(images))).permute(0, 3, 1, 2)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        train, random = self.data.train, self.random
        if len(self.order) < self.batch_size:
            self.order = np.concatenate([self.order, random.permutation(len(train))])
        rows, self.order = self.order[: self.batch_size], self.order[self.batch_size :]
        x = crop_and_flip(train.images[rows], random, flip=self.flip)
        return self.images(x), torch.from_numpy(train.labels[rows].astype(np.int64))

    def step(self) -> float:
        self.model.train()
        x, labels = self.batch()
        share = float(self.random.beta(MIXUP, MIXUP))
        other = torch.from_numpy(self.random.permutation(len(x)))
        x = (share * x + (1 - share) * x[other]).contiguous(memory_format=torch.channels_last)
        logits = self.model(x)
        loss = share * F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        loss = loss + (1 - share) * F.cross_entropy(logits, labels[other], label_smoothing=SMOOTHING)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        return float(loss)

    @torch.no_grad()
    def score(self) -> float:
        self.model.eval()
        test, correct = self.data.test or self.data.val, 0
        for start in range(0, len(test), 256):
            part = slice(start, start + 256)
            logits = self.model(self.images(test.images[part]).contiguous(memory_format=torch.channels_last))
            correct += int((logits.argmax(1).numpy() == test.labels[part]).sum())
        return 100 * correct / len(test)


def train_peer(
    name: str, data: Dataset, steps: int, seed: int, *, flip: bool = True, learning_rate: float | None = None
) -> dict[str, float]:
    """Trains so many steps on one thread."""
    torch.set_num_threads(1)
    run, losses, begun = Run(name, data, steps, seed, flip, learning_rate), [], time.monotonic()
    for _ in range(steps):
        losses.append(run.step())
        if not math.isfinite(losses[-1]):
            raise ValueError(f"{name}: the loss is {losses[-1]} at step {len(losses)}")
    recent = losses[-max(1, steps // 20) :]
    return {
        "top1": run.score(),
        "parameters": run.parameters,
        "train_loss": sum(recent) / len(recent),
        "seconds": time.monotonic() - begun,
    }


def time_peer(name: str, data: Dataset, steps: int = 20) -> float:
    """Images a second of its fastest step, on one thread."""
    torch.set_num_threads(1)
    run, times = Run(name, data, 1000, 0, True, None), []
    for _ in range(steps):
        begun = time.process_time()
        run.step()
        times.append(time.process_time() - begun)
    return run.batch_size / min(times)

"""The whole training step of the default model next to the same in torch: batch, augmentation, gradient, optimiser.

    .venv-peers/bin/python -m benchmarks.whole_step [--cores 1 2] [--batch 64] [--size 32]

Both sides train `hybrid_vit_tiny` with the recipe `default`: flips and crops, label smoothing, Muon for the hidden
matrices and AdamW for the rest, clipping, weight decay and an average of the weights. They start with the same weights,
and their logits are compared first. Within one process they take turns, and each keeps its fastest steps; each number
of cores has a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable

ROUNDS, STEPS = 12, 5


def torch_side(size: int, batch: int, variables: dict) -> tuple[Callable, Callable[[], None]]:
    """Logits of normalised images, channels last, and a training step."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    class ConvNorm(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.norm = nn.BatchNorm2d(outputs)

        def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
            x = self.norm(self.conv(x))
            return F.relu(x if shortcut is None else x + shortcut)

    class Block(nn.Module):
        def __init__(self, dim: int, heads: int, hidden: int, side: int) -> None:
            super().__init__()
            self.heads, self.side = heads, side
            self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
            self.mlp_in, self.mlp_out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
            self.local = nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, d = x.shape
            qkv = self.qkv(self.attention_norm(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(b, n, d))
            hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
            image = hidden.reshape(b, self.side, self.side, -1).permute(0, 3, 1, 2)  # channels last, as it lies there
            return x + self.mlp_out(hidden + self.local(image).permute(0, 2, 3, 1).reshape(hidden.shape))

    class HybridViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = max(size // 28, 1)
            self.convs, inputs = nn.ModuleList(), 3
            for width, stride in ((16, first), (32, 2), (64, 2)):
                pairs = [ConvNorm(width, width, 1) for _ in range(4)]
                self.convs.append(nn.ModuleList([ConvNorm(inputs, width, stride), *pairs]))
                inputs = width
            side = size // (4 * first)
            self.positions = nn.Parameter(torch.zeros(1, side * side, 64))
            self.blocks = nn.ModuleList([Block(64, 2, 128, side) for _ in range(2)])
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stem, *pairs in self.convs:
                x = stem(x)
                for one, two in zip(pairs[::2], pairs[1::2], strict=True):
                    x = two(one(x), x)
            x = x.permute(0, 2, 3, 1).flatten(1, 2) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    model = HybridViT()

    def take(target: torch.Tensor, value: np.ndarray) -> None:
        axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.ndim, tuple(range(value.ndim)))
        target.data.copy_(torch.tensor(np.asarray(value).transpose(axes)).reshape(target.shape))

    def take_norm(target: nn.Module, value: dict) -> None:
        take(target.weight, value["scale"])
        take(target.bias, value["bias"])

    params = variables["params"]
    for stage, (stem, *pairs) in enumerate(model.convs):
        paths = [params[f"conv_{stage}"]]
        paths += [params[f"conv_{stage}_pair_{i}"][which] for i in range(2) for which in ("first", "second")]
        for layer, path in zip([stem, *pairs], paths, strict=True):
            take(layer.conv.weight, path["conv"]["kernel"])
            take_norm(layer.norm, path["norm"])
    model.positions.data.copy_(torch.tensor(np.asarray(params["positions"]["grid"])).reshape(model.positions.shape))
    for i, block in enumerate(model.blocks):
        path = params[f"block_{i}"]
        take_norm(block.attention_norm, path["attention_norm"])
        take_norm(block.mlp_norm, path["mlp_norm"])
        for layer, names in (
            (block.qkv, ("attention", "qkv")),
            (block.out, ("attention", "out")),
            (block.mlp_in, ("mlp", "in")),
            (block.mlp_out, ("mlp", "out")),
            (block.local, ("mlp", "local")),
        ):
            found = path[names[0]][names[1]]
            take(layer.weight, found["kernel"])
            if layer.bias is not None:
                take(layer.bias, found["bias"])
    take_norm(model.norm, params["norm"])
    take(model.head.weight, params["head"]["kernel"])
    take(model.head.bias, params["head"]["bias"])
    model = model.to(memory_format=torch.channels_last)

    def by_muon(name: str, p: torch.Tensor) -> bool:
        return p.ndim > 1 and "head" not in name and name != "positions" and min(p.shape[0], p[0].numel()) >= 16

    named = list(model.named_parameters())
    matrices = [p for name, p in named if by_muon(name, p)]
    decayed = [p for name, p in named if p.ndim > 1 and name != "positions" and not by_muon(name, p)]
    others = [p for name, p in named if p.ndim <= 1 or name == "positions"]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 2.0}, {"params": others, "weight_decay": 0.0}], lr=2e-3, foreach=True
    )
    groups = defaultdict(list)
    for p in matrices:
        groups[p.shape[0], p[0].numel()].append(p)
    momenta = {shape: torch.zeros(len(group), *shape) for shape, group in groups.items()}

    @torch.no_grad()
    def muon() -> None:
        """The matrices of one shape at once."""
        for (rows, columns), group in groups.items():
            gradients = torch.stack([p.grad.reshape(rows, columns) for p in group])
            momentum = momenta[rows, columns].mul_(0.95).add_(gradients, alpha=0.05)
            x = gradients.lerp(momentum, 0.95)
            x = x / x.flatten(1).norm(dim=1).clamp(min=1e-8)[:, None, None]
            x = x.mT if rows > columns else x
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            x = x.mT if rows > columns else x
            x = x * max(1.0, rows / columns) ** 0.5
            for p, update in zip(group, x, strict=True):
                p.mul_(1 - 0.004).add_(update.reshape(p.shape), alpha=-0.02)

    averages = [p.detach().clone() for p in model.parameters()]
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2048, size, size, 3), np.uint8)
    labels = torch.from_numpy(random.integers(0, 10, 2048))
    pad = round(size / 8)

    def step() -> None:
        rows = random.integers(0, len(images), batch)
        x = np.pad(images[rows], ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
        tops, lefts = random.integers(0, 2 * pad + 1, (2, batch))
        x = np.stack([each[t : t + size, s : s + size] for each, t, s in zip(x, tops, lefts, strict=True)])
        mirrored = random.random(batch) < 0.5
        x[mirrored] = x[mirrored, :, ::-1]
        x = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
        model.train()
        F.cross_entropy(model(x), labels[rows], label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        muon()
        adam.step()
        model.zero_grad(set_to_none=True)
        torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.01)

    @torch.no_grad()
    def logits(x: np.ndarray) -> np.ndarray:
        model.eval()
        return model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    return logits, step


def measure(size: int, batch: int) -> tuple[float, float]:
    """Images a second of ours and of torch."""
    import jax
    import numpy as np
    import torch

    import smallvit
    from smallvit.data import load_data
    from smallvit.training.mesh import make_mesh
    from smallvit.training.recipe import RECIPES
    from smallvit.training.step import Pace
    from smallvit.training.trainer import Trainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    random = np.random.default_rng(0)
    path = f"/tmp/smallvit-whole-step-{size}.npz"
    images, labels = random.integers(0, 256, (2048, size, size, 3), np.uint8), np.arange(2048) % 10
    np.savez(path, train_images=images, train_labels=labels, test_images=images[:20], test_labels=labels[:20])
    data = load_data(path)
    model = smallvit.create_model("hybrid_vit_tiny", num_classes=10, image_size=size)
    trainer = Trainer(model, RECIPES["default"], data, make_mesh(None), batch, 0, accumulate=1, remat=False)
    state = trainer.init()
    variables = jax.device_get({"params": state.params, **state.others})
    theirs, torch_step = torch_side(size, batch, variables)

    x = random.standard_normal((8, size, size, 3)).astype(np.float32)
    ours = np.asarray(jax.jit(model.apply)(variables, x))
    difference = np.abs(ours - theirs(x)).max()
    if difference > 1e-4 * max(1.0, np.abs(ours).max()):
        raise ValueError(f"the logits differ by {difference}")

    count = 0

    def our_step() -> None:
        nonlocal state, count
        state, metrics = trainer.step(state, count, Pace(np.float32(1), np.float32(0.004), np.float32(0.99)))
        metrics.loss.block_until_ready()
        count += 1

    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(ROUNDS):
        for name, step in (("ours", our_step), ("torch", torch_step)):
            for _ in range(STEPS):
                begun = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - begun)
    return batch / min(times["ours"]), batch / min(times["torch"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    given = parser.parse_args()
    if given.here:
        print(*measure(given.size, given.batch))
        return
    print("| cores | ours, images/s | torch, images/s | ratio | ours per core |\n|---|---|---|---|---|")
    available, alone = sorted(os.sched_getaffinity(0)), None
    for cores in given.cores:
        command = [
            "taskset",
            "-c",
            ",".join(map(str, available[-cores:])),
            sys.executable,
            "-m",
            "benchmarks.whole_step",
        ]
        command += ["--here", "--batch", str(given.batch), "--size", str(given.size)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        ours, theirs = map(float, lines[-1].split())
        alone = alone or ours / cores
        print(
            f"| {cores} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} | {ours / cores / alone:.2f} |", flush=True
        )


if __name__ == "__main__":
    if "--here" in sys.argv:
        from smallvit.common.env import restart_fast

        restart_fast()
    main()

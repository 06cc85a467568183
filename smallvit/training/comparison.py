"""Comparison of several models, or an ablation, each trained with several seeds; the result is a table."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smallvit import plots
from smallvit.common.files import read_json, write_bytes, write_json
from smallvit.common.text import as_csv
from smallvit.count import multiply_adds
from smallvit.data.load import find_source
from smallvit.ops import pair
from smallvit.registry import create_model
from smallvit.runs.folder import CONFIG as RUN_CONFIG
from smallvit.runs.folder import RESULT
from smallvit.runs.saved import from_pretrained
from smallvit.training.config import CompareConfig, TrainConfig
from smallvit.training.loop import train
from smallvit.training.options import RunOptions

CONFIG = "compare.json"


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    model: str
    fields: tuple[str, ...]
    recipe: str

    def run(self, seed: int) -> str:
        """The name of the run folder for a seed."""
        return re.sub(r"[^\w.]+", "-", f"{self.name}-{seed}")


def compare(config: CompareConfig) -> list[dict[str, Any]]:
    """Trains every variant with every seed; writes table.md, table.csv and table.png, and returns the table's rows."""
    rows: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants(config)}
    configs = {
        (variant, seed): _train_config(config, variant, seed) for variant in rows for seed in range(config.seeds)
    }
    _claim(config)
    # Seed by seed: a comparison that is stopped early has a complete table of fewer seeds.
    for seed in range(config.seeds):
        for variant in rows:
            rows[variant].append(_run(configs[variant, seed]))
            _write(config.out, rows)
    return _table(config.out, rows)


def variants(config: CompareConfig) -> Iterator[Variant]:
    recipes, models = config.recipes.split(","), config.models.split(",")
    if config.ablation is not None:
        models = list(dict.fromkeys(model.removeprefix("sl_") for model in models))
    for recipe in recipes:
        suffix = f" {recipe}" if len(recipes) > 1 else ""
        for model in models:
            for part, fields in _parts(config, model).items():
                name = part if part and len(models) == 1 else f"{model} {part}".rstrip()
                yield Variant(name + suffix, model, (*config.fields, *fields), recipe)


def _parts(config: CompareConfig, model: str) -> dict[str, tuple[str, ...]]:
    """The fields of each row of a model, by the name of the row."""
    if config.ablation is None:
        return {"": ()}
    if config.ablation == "spt-lsa":
        return {"plain": (), "SPT": ("spt=true",), "LSA": ("lsa=true",), "SPT and LSA": ("spt=true", "lsa=true")}
    if config.ablation == "lsa":
        return {"plain": (), "temperature": ("lsa=temperature",), "mask": ("lsa=mask",), "LSA": ("lsa=true",)}
    assert config.image_size is not None
    patch, _ = pair(getattr(create_model(model, image_size=config.image_size), "patch_size", 2))
    amounts = sorted({round(patch * share) for share in (0.25, 0.5, 0.75, 1.0)} - {0})
    return {
        **{f"{way}, half a patch": ("lsa=true", f"spt={way}") for way in ("diagonal", "cardinal", "all")},
        **{f"diagonal, {by} of {patch} pixels": ("lsa=true", "spt=true", f"spt_shift={by}") for by in amounts},
    }


def _train_config(config: CompareConfig, variant: Variant, seed: int) -> TrainConfig:
    return TrainConfig(
        data=config.data,
        model=variant.model,
        fields=variant.fields,
        recipe=variant.recipe,  # pyright: ignore[reportArgumentType], checked by TrainConfig
        minutes=config.minutes,
        epochs=config.epochs,
        image_size=config.image_size,
        fit=config.fit,
        seed=seed,
        labels=config.labels,
        group=config.group,
        in_recipe=config.in_recipe,
        machine=config.machine,
        run=RunOptions(runs=config.out / "runs", name=variant.run(seed), data_dir=config.data_dir),
    )


def _claim(config: CompareConfig) -> None:
    """Checks that the folder is new, or holds the same comparison, or one of which no run could start."""
    find_source(config.data)
    settings = {name: str(value) for name, value in asdict(config).items() if name not in ("seeds", "machine", "out")}
    if (config.out / CONFIG).exists():
        started = any(config.out.glob(f"runs/*/{RUN_CONFIG}"))
        if started and read_json(config.out / CONFIG) != settings:
            raise ValueError(f"{config.out} holds another comparison: choose another --out")
    elif config.out.exists() and any(not path.name.endswith(".tmp") for path in config.out.iterdir()):
        raise ValueError(f"{config.out} is not empty and holds no comparison: choose another --out")
    write_json(config.out / CONFIG, settings)


def _run(config: TrainConfig) -> dict[str, Any]:
    """The result of a run: finished earlier, resumed, or new."""
    assert config.run.name is not None
    folder = config.run.runs / config.run.name
    if (folder / RESULT).exists():
        return read_json(folder / RESULT)
    started = (folder / RUN_CONFIG).exists()
    return train(TrainConfig(resume=folder, machine=config.machine) if started else config)


def _table(out: Path, rows: dict[Variant, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    table = []
    for variant, results in rows.items():
        if not results:
            continue
        which = "test_top1" if results[0]["test_top1"] is not None else "val_top1"
        scores = [result[which] for result in results]
        saved = from_pretrained(out / "runs" / variant.run(0))
        table.append(
            {
                "model": variant.name,
                which: round(statistics.mean(scores), 2),
                "spread": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
                "seeds": len(scores),
                "val_top1_mean": round(statistics.mean(result["val_top1"] for result in results), 2),
                "epochs": round(statistics.mean(result["epochs"] for result in results), 1),
                "minutes": round(statistics.mean(result["minutes"] for result in results), 1),
                "images_per_second": round(statistics.mean(result["images_per_second"] for result in results)),
                "parameters": results[0]["parameters"],
                "multiply_adds": multiply_adds(saved.model, saved.preprocess.size, saved.preprocess.channels),
                "scores": " ".join(f"{score:.2f}" for score in scores),
            }
        )
    return table


def _write(out: Path, rows: dict[Variant, list[dict[str, Any]]]) -> None:
    table = _table(out, rows)
    write_bytes(out / "table.csv", as_csv([list(table[0]), *(list(row.values()) for row in table)]).encode())
    write_bytes(out / "table.md", markdown(table).encode())
    scores = {row["model"]: [float(score) for score in row["scores"].split()] for row in table}
    plots.save(plots.comparison(scores), out / "table.png")


def markdown(table: list[dict[str, Any]]) -> str:
    which = "test" if "test_top1" in table[0] else "val"
    lines = [
        f"| model | {which} top-1 % | seeds | epochs | minutes | images/s | parameters | multiply-adds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        lines.append(
            f"| {row['model']} | {row[which + '_top1']:.2f}{spread} | {row['scores']} | {row['epochs']:g} "
            f"| {row['minutes']:g} | {row['images_per_second']:,} | {row['parameters']:,} "
            f"| {row['multiply_adds'] / 1e6:,.1f} M |"
        )
    return "\n".join(lines) + "\n"

"""`monarch-rocm compress`: a folder with a transformers model in, a smaller one out."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import monarch_rocm
from monarch_rocm import files
from monarch_rocm.allocation import Budget
from monarch_rocm.calibration import Readout
from monarch_rocm.config import MonarchConfig
from monarch_rocm.convert import monarchize
from monarch_rocm.healing import heal
from monarch_rocm.integrations.transformers import METHOD, register, remember
from monarch_rocm.structure import restructure, structure

WORK = "compressing"  # folder in the output for what a stopped run has done
FEW = 100  # texts
BESIDE = ("modules.json", "1_Pooling", "sentence_bert_config.json", "config_sentence_transformers.json")

CARD = """\
Compressed with monarch-rocm {version}: {before:,} parameters became {after:,}. Its layers are in
`report.txt`. Without the second and third line transformers only warns, and draws the layers at random:

```python
from transformers import {name}
from monarch_rocm.integrations.transformers import register

register()
model = {name}.from_pretrained({out!r})
```
"""  # the README.md of the new folder


class InputError(ValueError):
    """Something that was asked for cannot be done; the message is for the user."""


def compress(arguments: argparse.Namespace, console: Console) -> int:
    """Run the command; the exit status is 2 for bad input and 1 for what failed on the way."""
    stage = ["loading"]
    try:
        _compress(arguments, console, stage)
    except InputError as error:
        console.print(f"monarch-rocm compress: {error}", markup=False, soft_wrap=True)
        return 2
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "memory" in str(error)):
            raise
        console.print(
            f"monarch-rocm compress ran out of memory while {stage[0]}. What was done before is kept in "
            f"{arguments.out / WORK}: run the same command again, with a --batch below {arguments.batch}, a "
            f"--max-length below {arguments.max_length}, or --device cpu.\n{str(error).splitlines()[0]}",
            markup=False,
            soft_wrap=True,
        )
        return 1
    return 0


def _compress(arguments: argparse.Namespace, console: Console, stage: list[str]) -> None:
    texts = _texts(arguments.calibration)
    try:
        budget = Budget(arguments.budget, arguments.of)
    except ValueError as error:
        raise InputError(error) from None
    if arguments.heal < 0 or not arguments.lr > 0:
        given = f"--heal {arguments.heal} --lr {arguments.lr:g}"
        raise InputError(f"healing takes no fewer than 0 steps and a rate above 0, but {given} was given")
    device = _device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder, out, work = arguments.model, arguments.out, arguments.out / WORK
    dense, tokenizer = _load(folder)
    _check_tokenizer(tokenizer, texts, folder)
    if len(texts) < FEW:
        console.print(
            f"{len(texts)} texts are few: the new layers will fit these and little else", style="yellow"
        )
    if out.resolve() == folder.resolve():
        raise InputError("--out is the model's own folder, which is not overwritten")
    if (out / "config.json").exists() and not work.exists():
        raise InputError(f"{out} holds a model already; give another --out, or remove it")
    dense.eval().to(device)
    readout = _readout(folder)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to --out {out}: {error.strerror}") from None
    plan = {
        "budget": budget.fraction,
        "of": budget.of,
        "texts": _digest(texts),
        "model": str(folder.resolve()),
    }

    stage[0] = "fitting"
    fitted = work / "fitted.pt"
    if fitted.exists():
        student, report = _resume(fitted, plan, folder, device)
        console.print(f"fitted before: {fitted}", markup=False, soft_wrap=True)
    else:
        batches = _Batches(tokenizer, texts[: arguments.texts], arguments.batch, arguments.max_length)
        student = _load(folder)[0].eval().to(device)
        with console.status(f"fitting to {min(len(texts), arguments.texts):,} texts"):
            try:
                student, found = monarchize(
                    student, MonarchConfig(), calibration=batches, budget=budget, readout=readout
                )
            except ValueError as error:
                raise InputError(error) from None
        if not found.rows:
            raise InputError(
                "nothing was replaced: the model has no linear layers that pay within the budget"
            )
        report = str(found)
        with files.written(fitted) as file:
            torch.save([plan, structure(student), student.state_dict(), report], file)
    print(report)
    if arguments.heal:
        stage[0] = "healing"
        batches = _Batches(tokenizer, texts, arguments.batch, arguments.max_length)
        options = {"steps": arguments.heal, "lr": arguments.lr, "readout": readout}
        try:
            heal(student, dense, batches, checkpoint=work / "healing.pt", **options)
        except (ValueError, FloatingPointError) as error:
            raise InputError(error) from None
    stage[0] = "saving"
    remember(student)
    student.save_pretrained(out)  # type: ignore[operator]
    tokenizer.save_pretrained(out)
    for name in BESIDE:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, out / name, dirs_exist_ok=True)
        elif (folder / name).exists():
            shutil.copy2(folder / name, out / name)
    (out / "report.txt").write_text(report + "\n", encoding="utf-8")
    sizes = [sum(p.numel() for p in model.parameters()) for model in (dense, student)]
    card = CARD.format(
        version=monarch_rocm.__version__,
        before=sizes[0],
        after=sizes[1],
        name=type(student).__name__,
        out=str(out),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(work)
    console.print(
        f"{sizes[0]:,} parameters became {sizes[1]:,} ({sizes[1] / sizes[0]:.1%}). To load it: "
        "monarch_rocm.integrations.transformers.register(), then "
        f"{type(student).__name__}.from_pretrained({str(out)!r})",
        markup=False,
        soft_wrap=True,
    )


def _texts(file: Path) -> list[str]:
    """The lines of a file that hold something."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read --calibration {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--calibration {file} is not UTF-8: {error.reason}") from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise InputError(f"--calibration {file} has no text; it should have one a line")
    return texts


def _device(name: str) -> str:
    """`name`, where a tensor can be put there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without GPUs
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used: {reason}; give cpu, or leave it out") from None
    return name


def _check_tokenizer(tokenizer: Any, texts: list[str], folder: Path) -> None:
    """Raise where most of the texts' tokens are unknown: transformers makes an empty tokenizer of a folder
    that has none.
    """
    plain = {"add_special_tokens": False, "verbose": False}
    ids = [token for text in texts[:FEW] for token in tokenizer(text, **plain)["input_ids"]]
    unknown = sum(token == tokenizer.unk_token_id for token in ids)
    if not ids or unknown > len(ids) / 2:
        raise InputError(
            f"the tokenizer of {folder} knows {len(ids) - unknown:,} of {len(ids):,} tokens of the first "
            "texts: is its tokenizer.json missing, or are the texts in another language?"
        )


def _load(folder: Path) -> tuple[Any, Any]:
    """Model, of the class that its config names, and tokenizer."""
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise InputError(f"{folder} {what}; a transformers model is needed, as save_pretrained writes it")
    try:
        import transformers
        from safetensors import SafetensorError
    except ImportError:
        raise InputError("transformers is not installed: pip install 'monarch-rocm[hf]'") from None
    register()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == METHOD:
            raise InputError(f"{folder} is compressed already")
        names = getattr(config, "architectures", None) or []
        kind = next(
            (found for name in names if (found := getattr(transformers, name, None))), transformers.AutoModel
        )
        model, missing = _weights(kind, folder)
        if missing and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
            # A config may name a head that was never saved, as those of sentence encoders do.
            model, missing = _weights(transformers.AutoModel, folder)
        if missing:
            raise InputError(
                f"the weights in {folder} lack {len(missing)} of the model's, to be drawn at random: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(f"a weights file of {folder} is cut or damaged, copy it again: {error}") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"cannot load {folder}: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _weights(kind: Any, folder: Path) -> tuple[Any, list[str]]:
    """The model, and the names of weights that the folder lacks, but for those of an encoder's pooler."""
    model, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    return model, sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))


def _readout(folder: Path) -> Readout | None:
    """The sentence embedding, where a folder of sentence-transformers says how it is pooled."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    pooling = json.loads(file.read_text(encoding="utf-8"))

    def embedding(output: Any, batch: Any) -> Tensor:
        hidden: Tensor = output.last_hidden_state
        if pooling.get("pooling_mode_cls_token"):
            return F.normalize(hidden[:, 0], dim=-1)
        mask = batch["attention_mask"][..., None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    known = ("pooling_mode_cls_token", "pooling_mode_mean_tokens")
    used = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
    return embedding if len(used) == 1 and used[0] in known else None


@dataclass(frozen=True)
class _Batches:
    """Texts in their order, a fixed number at a time."""

    tokenizer: Any
    texts: list[str]
    size: int
    length: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(self.texts), self.size):
            some = self.texts[start : start + self.size]
            yield dict(
                self.tokenizer(
                    some, padding=True, truncation=True, max_length=self.length, return_tensors="pt"
                )
            )


def _resume(file: Path, plan: dict[str, Any], folder: Path, device: str) -> tuple[nn.Module, str]:
    try:
        before, found, state, report = files.loaded(file)
    except Exception as error:
        raise InputError(f"{file} is broken, remove it or give another --out: {error}") from error
    if before != plan:
        raise InputError(
            f"{file.parent} is of a run with {before}, not with {plan}; remove it, or give another --out"
        )
    student = _load(folder)[0].eval()
    try:
        student = restructure(student, found)
        student.load_state_dict(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{file} does not fit {folder}, remove it or give another --out: {error}") from error
    return student.to(device), report


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

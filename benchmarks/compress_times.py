"""What a sentence costs in MiniLM and in its compressed forms; needs neither its weights nor its texts.

    python benchmarks/compress_times.py [--device cuda] [--out benchmarks/results/compress_times.json]

Models have MiniLM's architecture, random weights, and the factors' sizes that `benchmarks/compress.py`
found (`compress.json`); times do not depend on the values. A device's earlier rows are replaced.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from environment import environment
from torch import nn

from monarch_rocm import restructure

RESULTS = Path(__file__).parent / "results"
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LENGTH = 32  # tokens of a sentence


def build(shapes, device, dtype):
    """The encoder, with Monarch layers of these sizes where there are any."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**MINILM)
    model = transformers.BertModel(config, add_pooling_layer=True).eval()
    layers = {}
    for name, (one, two) in shapes.items():
        sizes = {key: getattr(model.get_submodule(name), key) for key in ("in_features", "out_features")}
        layers[name] = sizes | {"blkdiag1": one, "blkdiag2": two, "bias": True}
        layers[name] |= {"layout": "interleaved", "backend": "auto", "recompute": False}
    if layers:
        model = restructure(model, {"format": 1, "layers": layers})
        for layer in (model.get_submodule(name) for name in layers):
            nn.init.normal_(layer.blkdiag1, std=0.05)
            nn.init.normal_(layer.blkdiag2, std=0.05)
    return model.to(device, dtype)


def timed(models, count, rounds):
    """Median milliseconds a sentence, by the clock and of the processor, models in turns."""
    device = next(iter(models.values())).device
    tokens = torch.randint(1000, 30000, (count, LENGTH), device=device)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    found = {name: ([], []) for name in models}
    warm_up = 10 if device.type == "cuda" else 3
    with torch.inference_mode():
        for turn in range(rounds + warm_up):
            for name, model in models.items():
                clock, used = time.perf_counter(), time.process_time()
                model(**batch)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                spent = time.perf_counter() - clock, time.process_time() - used
                if turn >= warm_up:
                    for values, value in zip(found[name], spent, strict=True):
                        values.append(value)
    return {
        name: [statistics.median(values) / count * 1e3 for values in pair] for name, pair in found.items()
    }


def table(result):
    """The rows as markdown, a table for each device."""
    lines = []
    for found in result:
        kinds = list(dict.fromkeys((row["mode"], row["batch"]) for row in found["rows"]))
        known = found["environment"]
        lines += [
            f"Milliseconds a sentence of {LENGTH} tokens on {known['device']}, {known['threads']} thread(s), "
            f"{known['dtype']}, {known['date']}, torch {known['torch']}, by `benchmarks/compress_times.py`"
            + (":" if known["device_type"] == "cuda" else " (in brackets the processor's own time):"),
            "",
            "| model | " + " | ".join(f"{mode}, batch {batch}" for mode, batch in kinds) + " |",
            "|---|" + "---|" * len(kinds),
        ]
        for name in dict.fromkeys(row["name"] for row in found["rows"]):
            own = {(row["mode"], row["batch"]): row for row in found["rows"] if row["name"] == name}
            cells = [f"{own[kind]['ms']:.3g}" for kind in kinds]
            if known["device_type"] != "cuda":
                cells = [f"{cell} ({own[k]['cpu_ms']:.3g})" for cell, k in zip(cells, kinds, strict=True)]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=Path, default=RESULTS / "compress.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "compress_times.json")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    rows = json.loads(args.sizes.read_text())["rows"]
    sizes = {"dense": {}} | {row["name"]: row["shapes"] for row in rows if "shapes" in row}
    models = {name: build(shapes, args.device, dtype) for name, shapes in sizes.items()}
    modes = {"eager": models}
    if gpu:  # one CUDA graph a batch size: what a service would run
        modes["compiled"] = {name: torch.compile(m, mode="reduce-overhead") for name, m in models.items()}
    found = {"environment": environment(args.device) | {"dtype": str(dtype)}, "rows": []}
    old = json.loads(args.out.read_text()) if args.out.exists() else []
    kept = [other for other in old if other["environment"]["device"] != found["environment"]["device"]]
    for mode, some in modes.items():
        for count in (1, 32):
            torch.compiler.reset()
            for name, (clock, used) in timed(some, count, args.rounds).items():
                row = {"name": name, "mode": mode, "batch": count, "tokens": LENGTH}
                found["rows"].append(row | {"ms": clock, "cpu_ms": used})
                print(found["rows"][-1], flush=True)
            args.out.write_text(json.dumps([*kept, found], indent=1) + "\n")


if __name__ == "__main__":
    main()

"""MiniLM compressed in several ways, and scored; rows are written as they are found.

    python benchmarks/compress.py [--data DIR] [--steps 300] [--out benchmarks/results/compress.json]

A row that is in the file already is not measured again, and healing that was stopped goes on, so that a
run may be stopped at any time. `--only` chooses rows. Text: `examples/minilm_texts.py`.
What a sentence costs is measured by `compress_times.py`.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import compress_minilm as minilm  # noqa: E402
import compress_times  # noqa: E402
from environment import environment  # noqa: E402
from minilm_texts import texts  # noqa: E402
from report import insert  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

import monarch_rocm  # noqa: E402
from monarch_rocm import Budget, MonarchConfig  # noqa: E402

TIMES = ROOT / "benchmarks" / "results" / "compress_times.json"
SMALL, SMALLER = 16_100_000, 13_000_000  # parameters


def build(dense, way, limit, calibration):
    """A model of at most `limit` parameters, and the report."""
    budget = limit / sum(p.numel() for p in dense.parameters())
    if way == "ours":
        return minilm.compress(dense, calibration, Budget(budget))
    if way == "truncated SVD":  # of the weights, ranks for the least error of all of them together
        return minilm.compress(dense, None, Budget(budget, nblocks=(1,)))
    return minilm.compress(dense, calibration if way == "4 blocks" else None, None, MonarchConfig(nblocks=4))


def table(result):
    """The rows as markdown, with their environment."""
    found = result["environment"]
    lines = [
        f"Measured by `benchmarks/compress.py` on {found['device']}, {found['threads']} thread(s), "
        f"{found['date']}, torch {found['torch']}, transformers {found['transformers']}.",
        "",
        "| model | parameters | healed | Lee-50 | WordSim-353 | probe |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        way, *rest = row["name"].split(":")
        healed = f"{row['steps']} steps of {row['tokens']} tokens" if rest[1:] else ""
        right = f"{row['probe']:.1%}" if "probe" in row else ""
        cells = [way, f"{row['parameters']:,}", healed, f"{row['lee50']:.3f}", f"{row['wordsim']:.3f}", right]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_report(result, times):
    """Put the tables into the guide."""
    page = ROOT / "docs" / "compression.md"
    tables = f"{table(result)}\n\n{compress_times.table(times)}"
    page.write_text(insert(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="/usr/share", help="where wordnet/ and dictd/ are")
    parser.add_argument("--steps", type=int, default=300, help="of healing")
    parser.add_argument("--tokens", type=int, default=1024, help="a step")
    parser.add_argument("--only", nargs="+", metavar="WAY:PARAMETERS[:healed]", help="rows")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compress.json")
    parser.add_argument("--work", type=Path, default=Path("compress-work"), help="for models and checkpoints")
    parser.add_argument("--report", action="store_true", help="only put the file's rows into the guide")
    args = parser.parse_args()
    if args.report:
        write_report(*(json.loads(path.read_text()) for path in (args.out, TIMES)))
        return
    args.work.mkdir(exist_ok=True)
    transformers.utils.logging.disable_progress_bar()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(minilm.PATH)
    dense = AutoModel.from_pretrained(minilm.PATH).eval().to(device)
    found = texts(args.data)
    calibration = minilm.Batches(tokenizer, found[: minilm.CALIBRATION], 2048)
    healing = minilm.Batches(tokenizer, found[minilm.CALIBRATION :], args.tokens)

    with_texts = {"transformers": transformers.__version__, "texts": len(found)}
    with_texts["texts_sha256"] = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    result = {"environment": environment(device) | with_texts, "rows": []}
    if args.out.exists():
        result = json.loads(args.out.read_text())
    done = {row["name"] for row in result["rows"]}

    def add(**row):
        result["rows"].append(row)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(row, flush=True)

    if "dense" not in done:
        add(name="dense", **minilm.score(dense, tokenizer, args.data))
    default = [f"{way}:{SMALL}:healed" for way in ("ours", "truncated SVD", "4 blocks")]
    default += [f"ours:{SMALLER}:healed", f"4 blocks, projected:{SMALL}"]
    for name in args.only or default:
        way, limit, *heals = name.split(":")
        plain = f"{way}:{limit}"
        file = args.work / f"{plain.replace(' ', '_')}.pt"
        if not file.exists():
            began = time.perf_counter(), time.process_time()
            student, report = build(dense, way, int(limit), calibration)
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            torch.save((monarch_rocm.structure(student), student.state_dict(), str(report), spent), file)
        structure, state, report, spent = torch.load(file, weights_only=True)
        student = monarch_rocm.restructure(AutoModel.from_pretrained(minilm.PATH).to(device), structure)
        student.load_state_dict(state)
        if plain not in done:
            shapes = {
                name: [layer["blkdiag1"], layer["blkdiag2"]] for name, layer in structure["layers"].items()
            }
            took = {"seconds": spent[0], "cpu_seconds": spent[1]}
            add(
                name=plain, **minilm.score(student, tokenizer, args.data, probes=False), **took, shapes=shapes
            )
        if heals and f"{plain}:healed" not in done:
            used = time.process_time()
            healed = minilm.train(
                student, dense, healing, args.steps, checkpoint=file.with_suffix(".healing")
            )
            took = {"seconds": healed.seconds, "cpu_seconds": time.process_time() - used}
            took |= {"resumed_at": healed.resumed_at, "steps": args.steps, "tokens": args.tokens}
            scores = minilm.score(student, tokenizer, args.data)
            torch.save((structure, student.state_dict(), report, spent), file.with_suffix(".healed"))
            add(name=f"{plain}:healed", **scores, **took)


if __name__ == "__main__":
    main()

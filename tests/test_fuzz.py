"""A few examples of what `make fuzz` tries for minutes, the same ones every time; and files that attack."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")
import fuzz

from monarch_rocm import compress, healing


@pytest.mark.parametrize("name", fuzz.PROPERTIES)
def test_properties_hold(name):
    fuzz.run(name, fuzz.PROPERTIES[name][2])
    assert fuzz.counted[name] >= fuzz.PROPERTIES[name][2]


class Bomb:
    """What runs when a pickle that holds it is read without care."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.mark.parametrize("place", ["whole", "inside"])
def test_no_loader_runs_what_a_file_holds(place, tmp_path):
    mark, file = tmp_path / "ran", tmp_path / "file.pt"
    bomb = Bomb(str(mark))
    torch.save(bomb if place == "whole" else {"plan": {}, "parameters": {}, "losses": [bomb]}, file)
    with pytest.raises(ValueError, match="no checkpoint of heal"):
        healing._resume(file, {}, {}, None)
    torch.save(bomb if place == "whole" else ({}, {"format": 1}, {"0.weight": bomb}, "report"), file)
    with pytest.raises(compress.InputError, match="is broken"):
        compress._resume(file, {}, tmp_path, "cpu")
    assert not mark.exists()
    torch.load(file, weights_only=False)  # the bomb does work
    assert mark.exists()


def test_a_file_of_another_run_of_compress_is_refused_with_what_to_do(tmp_path):
    """Its structure or its tensors damaged: the command says so and does not go on with half a model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    file = tmp_path / "fitted.pt"
    for found, said in (
        ({"format": 1, "layers": {"nowhere": {}}}, "'nowhere', which this model lacks"),
        (3, "mapping"),
    ):
        torch.save(({}, found, {}, "report"), file)
        with pytest.raises(compress.InputError, match=said):
            compress._resume(file, {}, tmp_path, "cpu")


def test_a_name_that_is_damaged_in_a_checkpoint_does_not_pass_for_another():
    """Found by fuzzing: AdamW took a group with a name spoilt and failed a step later."""
    content = fuzz.CHECKPOINT.replace(b"weight_decay", b"weight_dEcay")
    assert content != fuzz.CHECKPOINT
    before = fuzz.counted["checkpoints that loaded all the same"]
    fuzz.check_damaged_checkpoint(content)
    assert fuzz.counted["checkpoints that loaded all the same"] == before

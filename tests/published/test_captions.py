"""Texts about pictures: pairs whose source is an array, for an encoder-decoder of our own and for
BLIP-2."""

import json

import numpy as np
import pytest

import sample
import train
from published.folders import export
from tasks.examples import Pairs, named_array
from tasks.pairs import collate
from tests.helpers import rows_in
from tests.published.test_two_towers import QUERIES, blip2_folder
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Bytes, published_tokenizer

PLACES = ["top left", "top right", "below left", "below right"]
MODEL = ["--model", "transformer", "--encoder_layers", "1", "--stem", "patches", "--image_size",
         "8", "--patch_size", "4", "--channels", "1", "--layers", "1", "--d_model", "32", "--heads",
         "4", "--positions", "learned", "--seq_len", "16"]


def squares(folder, count=400):
    """Pictures with a bright quarter, in one file, and lines that name them and say which it is."""
    rng, folder = np.random.default_rng(0), folder / "squares"
    folder.mkdir()
    where = rng.integers(0, 4, count)
    pictures = rng.normal(size=(count, 1, 8, 8)).astype(np.float32) * 0.1
    for picture, place in zip(pictures, where):
        y, x = divmod(place, 2)
        picture[0, 4 * y:4 * y + 4, 4 * x:4 * x + 4] += 2
    np.save(folder / "pictures.npy", pictures)
    np.save(folder / "first.npy", pictures[0])
    names = ["first.npy", *(f"pictures.npy:{i}" for i in range(1, count))]
    (folder / "captions.jsonl").write_text("".join(
        json.dumps({"source": name, "target": PLACES[i]}) + "\n" for name, i in zip(names, where)))
    return folder, where


def command(folder, out, *flags):
    train.main(["--data", str(folder), "--out", str(out), "--batch", "16", "--lr", "0.01",
                *MODEL, *flags])
    return rows_in(out / "metrics.jsonl")


@pytest.mark.full
def test_captions_are_learned_on_a_mesh_as_on_another(tmp_path):
    """A picture whose patches a mesh splits; weights of the encoder that are updated twice."""
    folder, _ = squares(tmp_path, 40)
    few = ["--steps", "4", "--save_every", "0", "--eval_every", "4", "--fsdp_min", "1"]
    rows, others = (command(folder, tmp_path / mesh, "--mesh", mesh, *few)
                    for mesh in ("data=8", "fsdp=4,tensor=2"))
    for a, b in zip(rows, others, strict=True):
        for name in {"loss", "eval_loss"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-5)


@pytest.mark.full
def test_an_encoder_decoder_learns_to_caption(tmp_path, capsys):
    """A picture that the decoder does not see; a caption that does not end."""
    folder, where = squares(tmp_path)
    rows = command(folder, tmp_path / "run", "--mesh", "data=8", "--steps", "200", "--metric",
                   "exact", "--eval_every", "200", "--save_every", "0")
    assert rows[-1]["exact"] > 0.95
    assert "--source FILE.npy" in capsys.readouterr().out
    sample.main(["--run", str(tmp_path / "run"), "--source", str(folder / "pictures.npy"), "--json",
                 "--temperature", "0", "--mesh", "fsdp=2,tensor=2"])
    said = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert np.mean([text == PLACES[i] for text, i in zip(said, where, strict=True)]) > 0.95


@pytest.mark.full
@pytest.mark.parametrize("name", ["blip2", "blip2 t5"])
def test_blip2_is_fine_tuned_on_captions(name, tmp_path, capsys):
    """A target at the place of an image token; a caption without an end, which never stops; a text
    of T5's encoder in training that is not the one in sampling."""
    blip2_folder(tmp_path, "top left below right", name)
    rng = np.random.default_rng(0)
    for name, sign in (("dark", -1), ("bright", 1)):
        np.save(tmp_path / f"{name}.npy", sign * np.abs(rng.normal(size=(3, 20, 20))))
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps({"source": f"{name}.npy", "target": text}) + "\n"
        for name, text in (("dark", "below"), ("bright", "top right")) * 8))
    train.main(["--data", str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "model"),
                "--out", str(tmp_path / "run"), "--seq_len", "20", "--batch", "8", "--steps", "120",
                "--lr", "0.003", "--mesh", "fsdp=2,tensor=2", "--fsdp_min", "1"])
    capsys.readouterr()
    for name, text in (("dark", "below"), ("bright", "top right")):
        sample.main(["--run", str(tmp_path / "run"), "--source", str(tmp_path / f"{name}.npy"),
                     "--temperature", "0", "--json", "--tokens", "12"])
        said = json.loads(capsys.readouterr().out)
        assert (said["text"].strip(), said["stopped"]) == (text, "stop"), said


@pytest.mark.full
def test_t5_is_fine_tuned_on_questions_about_pictures(tmp_path, capsys):
    """A question that the encoder reads in training and that sample.py drops, or that it reads in
    another place: both questions about a picture would have one answer."""
    blip2_folder(tmp_path, "what where top left below right", "blip2 t5")
    tokenizer = published_tokenizer(tmp_path / "model", 320)
    picture = np.random.default_rng(0).normal(size=(3, 20, 20)).astype(np.float32)
    np.save(tmp_path / "one.npy", picture)
    answers = {"what": "below", "where": "top right"}
    rows = [(np.array([310] * QUERIES + tokenizer.with_ends(question)),
             np.array(tokenizer.with_ends(text))) for question, text in answers.items()] * 8
    batch = collate(rows, 512, 12, [7], 1)
    np.savez(tmp_path / "a.npz", **{**batch, "source": np.array([picture] * len(rows)),
                                    "source_tokens": batch["source"]})
    train.main(["--data", str(tmp_path / "a.npz"), "--model", str(tmp_path / "model"), "--seq_len",
                "12", "--out", str(tmp_path / "run"), "--batch", "8", "--steps", "80", "--lr",
                "0.003", "--mesh", "data=4,tensor=2", "--fsdp_min", "1"])
    export(["--run", str(tmp_path / "run"), "--export", str(tmp_path / "out")])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / file).write_bytes((tmp_path / "model" / file).read_bytes())
    for question, text in answers.items():
        capsys.readouterr()
        sample.main(["--model", str(tmp_path / "out"), "--source", str(tmp_path / "one.npy"),
                     "--prompt", question, "--temperature", "0", "--json", "--tokens", "12"])
        said = json.loads(capsys.readouterr().out)
        assert (said["text"].strip(), said["stopped"]) == (text, "stop"), said


def test_targets_after_several_ids():
    """A loss at the places that a picture has; the first target after the wrong id."""
    batch = collate([(np.zeros(2), np.array([5, 6, 2])), (np.ones(2), np.array([1, 7]))], 0, 6,
                    [9, 9, 1], 2)
    assert batch["tokens"].tolist() == [[9, 9, 1, 5, 6, 0], [9, 9, 1, 7, 0, 0]]
    assert batch["targets"].tolist() == [[0, 0, 5, 6, 2, 0], [0, 0, 7, 2, 0, 0]]
    assert batch["weights"].tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]
    assert batch["source"].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("name, says", [
    ("none.npy", "No such file"), ("many.npy:7", "out of bounds"),
    ("many.npy", r"it has \[3, 2\]"), ("many.npy:x", r"it has \[3, 2\]"), ("a.txt", "not a numpy")])
def test_an_array_that_is_not_there_is_named_with_its_line(tmp_path, name, says):
    np.save(tmp_path / "many.npy", np.ones((3, 2)))
    (tmp_path / "a.txt").write_text("text")
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"source": name, "target": "x"}) + "\n")
    with pytest.raises(ConfigError, match=rf"line 1: '{name}': expected a .npy file .*{says}"):
        Pairs(lines, Bytes(), shape=(2,), whole=True)
    assert named_array("many.npy:2", "", lines, (2,)).tolist() == [1, 1]

"""`stretto world` makes a film of the tiny model, and refuses by field what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from stretto.cli import main


def test_a_film_is_written_with_as_many_frames_as_asked(tmp_path: Path) -> None:
    out = tmp_path / "world.gif"
    assert (
        main(["world", "run", "--seconds", "1.5", "--plan", "by_step", "--devices", "cpu:0", "cpu:1", "--out", str(out)]) == 0
    )
    with Image.open(out) as film:
        assert film.size == (96, 64)
        assert film.n_frames == 24


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--size", "60", "96"], "pixel_height: got 60, expected a multiple of 16. the nearest is 64"),
        (["--window-frames", "1", "--frames-per-chunk", "3"], "window_frames: got 1"),
        (["--plan", "by_step", "--devices", *[f"cpu:{i}" for i in range(5)]], "devices: got 5"),
        (["--decoder", "none"], "decoder: got none"),
        (["--devices", "cuda:63"], "device: got cuda:63"),
        (["--seconds", "0"], "seconds: got 0.0"),
        (["--out", "/dev/null/w.gif"], "out: got /dev/null/w.gif"),
        (["--prompt", "word " * 9], "prompt: got 9 words, expected at most 8"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_field(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["world", "run", "--out", str(tmp_path / "w.gif"), *flags]) == 2
    assert said in capsys.readouterr().err

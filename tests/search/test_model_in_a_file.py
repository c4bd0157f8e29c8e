"""A model as a .zip file: the release asset, and translating from it."""

import runpy
from pathlib import Path
from zipfile import ZipFile

import pytest
from full_disk import largest_file
from model_dirs import write_model_dir

from fasttfm.errors import UserError
from fasttfm.models.quantize import quantize_model
from fasttfm.translate.translator import Translator

pack = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "model_asset.py"))["pack"]


@pytest.fixture
def packed(tmp_path):
    write_model_dir(tmp_path / "MODEL")
    assert pack(tmp_path / "MODEL", tmp_path / "demo.zip") == (tmp_path / "demo.zip").stat().st_size
    return tmp_path / "demo.zip"


def test_a_file_translates_like_its_folder_and_has_a_readme(packed):
    quantize_model(packed.with_name("MODEL"), "best", packed.with_name("Q"))
    lines = ["one two three", ""]
    found = [Translator.from_directory(path, beam=2).translate(lines) for path in (packed, packed.with_name("Q"))]
    assert found[0] == found[1]
    with ZipFile(packed) as archive:
        assert 'fasttfm.pipeline("translation", "demo.zip")' in archive.read("README.md").decode()


def test_a_full_disk_is_not_called_damage(packed):
    told = r"demo\.zip: cannot be unpacked into .*give the unpacked folder"
    with pytest.raises(UserError, match=told), largest_file(99):
        Translator.from_directory(packed)


@pytest.mark.parametrize("damage", ["cut off", "no archive", "a changed file"])
def test_a_damaged_file_is_refused(packed, damage):
    content = packed.read_bytes()
    if damage == "cut off":
        packed.write_bytes(content[:-200])
    elif damage == "no archive":
        packed.write_text("hello")
    else:
        with ZipFile(packed, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("config.yaml", "kind: transformer\n")
    with pytest.raises(UserError, match=r"demo\.zip: is neither|config\.yaml"):
        Translator.from_directory(packed)

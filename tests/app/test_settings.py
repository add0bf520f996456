from __future__ import annotations

from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.paths import Paths
from chatkv.app.settings import Settings, load_settings


@pytest.fixture
def paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"CHATKV_{name.upper()}", raising=False)
    paths = Paths.from_env()
    paths.config_dir.mkdir(parents=True)
    return paths


def refusal(paths: Paths, text: str | bytes = "") -> str:
    paths.settings_file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_settings(paths)
    return str(caught.value)


def test_defaults_then_the_file_then_the_environment(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(paths) == Settings()
    paths.settings_file.write_text("port = 1234\nmax_num_seqs = 3\n")
    monkeypatch.setenv("CHATKV_PORT", "4321")
    settings = load_settings(paths)
    assert (settings.port, settings.max_num_seqs, settings.host) == (4321, 3, "127.0.0.1")


def test_an_empty_variable_is_not_set(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_PORT", "")
    assert load_settings(paths).port == Settings().port


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("port = 70000", "port"),
        ('tcp = "perhaps"', "tcp"),
        ('device = "gpu"', "device"),
        ("gpu = -1", "gpu"),
        ('gpu_reserve_bytes = "some"', "gpu_reserve_bytes': not a size"),
        ("context_tokens = 1", "conte"),
        ("kv_disk_bytes = 4096", "kv_disk_bytes': must be 0 (off) or at least 16 MiB"),
        ('kv_disk_bytes = "much"', 'kv_disk_bytes\': not a size: write a number of bytes, or text such as "20GiB"'),
        ("kv_disk_bytes = -1", "kv_disk_bytes': not a size"),
        ('kv_dtype = "fp4"', "kv_dtype"),
        ('cpu_kernels = "gpu"', "cpu_kernels"),
        ("idle_unload_s = -1", "idle_unload_s"),
    ],
)
def test_a_wrong_value_names_the_file_and_the_field(paths: Paths, text: str, field: str) -> None:
    said = refusal(paths, text)
    assert f"Setting '{field}" in said
    assert f"It comes from {paths.settings_file}." in said


def test_sizes_are_bytes_or_text_with_a_unit(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.settings_file.write_text('kv_disk_bytes = "20GiB"\nkv_bytes = 1000000\n')
    monkeypatch.setenv("CHATKV_KV_HOST_BYTES", "1.5 GB")
    settings = load_settings(paths)
    assert (settings.kv_disk_bytes, settings.kv_bytes, settings.kv_host_bytes) == (20 << 30, 1_000_000, 1_500_000_000)
    monkeypatch.setenv("CHATKV_KV_DISK_BYTES", "0")
    assert load_settings(paths).kv_disk_bytes == 0


def test_a_wrong_variable_is_named_even_when_the_file_is_right(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_PORT", "many")
    assert "It comes from the environment variable CHATKV_PORT." in refusal(paths, "port = 1\ntcp = true")


def test_a_list_in_the_environment_that_is_none(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_ALLOWED_ORIGINS", "http://a")
    said = refusal(paths)
    assert "allowed_origins" in said
    assert "environment" in said


def test_a_misspelt_setting_is_told_its_neighbour(paths: Paths) -> None:
    said = refusal(paths, "prot = 1")
    assert said == f"There is no setting 'prot'. It stands in {paths.settings_file}.\nDid you mean 'port'?"


@pytest.mark.parametrize("text", ["port = ", b"\xff\xfe", "port 1"])
def test_a_file_that_is_not_toml_is_named(paths: Paths, text: str | bytes) -> None:
    assert f"{paths.settings_file} is not valid TOML" in refusal(paths, text)


def test_a_file_that_cannot_be_read_is_named(paths: Paths) -> None:
    paths.settings_file.mkdir()
    with pytest.raises(UserError, match=r"Cannot read .*settings.toml: Is a directory"):
        load_settings(paths)

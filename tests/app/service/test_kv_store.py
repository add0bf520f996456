"""The disk store of a service: its size, its absence, what it asks of the chats."""

from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.errors import UserError
from chatkv.app.paths import Paths
from chatkv.app.service.kv_store import DEFAULT_LIMIT_BYTES, fixed_quota, purge
from chatkv.app.service.ownership import ServiceLock
from chatkv.engine.errors import OwnersGoneError, StoreUnavailableError

from .support import FakeModels, Running, running_service, until


async def talk(running: Running, text: str = "say a text of more than sixteen tokens", **chat: Any) -> str:
    """The id of a chat with one answered turn."""
    made = await running.client.create_chat(**chat)
    await running.client.send_turn(made["id"], text)
    await running.settled(made["id"])
    await until(lambda: not running.service.warmer.is_warming(made["id"]))
    return str(made["id"])


def test_the_default_size_is_fixed_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 100 << 20}
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": free["bytes"]})())
    file, directory = tmp_path / "kv_quota", tmp_path / "cache" / "kv"
    assert fixed_quota(file, directory) == 25 << 20
    free["bytes"] = 10 << 20  # The store itself has filled the disk.
    assert fixed_quota(file, directory) == 25 << 20
    file.write_text("nonsense")
    directory.mkdir(parents=True)
    (directory / "slab").write_bytes(b"x" * (30 << 20))
    own_bytes = (directory / "slab").stat().st_blocks * 512
    assert fixed_quota(file, directory) == ((10 << 20) + own_bytes) // 4
    file.unlink()
    free["bytes"] = 1 << 50
    assert fixed_quota(file, directory) == DEFAULT_LIMIT_BYTES


def test_a_purge_removes_all_and_leaves_what_another_service_uses(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    purge(directory)
    directory.mkdir()
    (directory / "slab").write_bytes(b"secret")
    owner = ServiceLock(directory / "store.lock")
    assert owner.try_acquire()
    with pytest.raises(UserError, match="used by another service"):
        purge(directory)
    assert (directory / "slab").exists()
    owner.release()
    purge(directory)
    assert not directory.exists()


async def test_d3_zero_bytes_turn_it_off_and_remove_what_was_kept(home: Path) -> None:
    kv_dir = Paths.from_env().kv_dir
    kv_dir.mkdir(parents=True)
    (kv_dir / "slab").write_bytes(b"secret")
    async with running_service(FakeModels(), kv_disk_bytes=0) as running:
        await running.ready()
        await talk(running)
        assert not kv_dir.exists()
        disk = (await running.client.cache())["tiers"]["disk"]
        assert (disk["state"], disk["notice"], disk["num_blocks"]) == ("off", None, 0)
        assert (await running.client.status())["notices"] == []


async def test_a_link_is_followed_where_the_store_is_removed(home: Path, tmp_path: Path) -> None:
    kv_dir = Paths.from_env().kv_dir
    kv_dir.parent.mkdir(parents=True)
    (tmp_path / "slab").write_bytes(b"secret")
    kv_dir.symlink_to(tmp_path)
    async with running_service(FakeModels(), kv_disk_bytes=0) as running:
        await running.ready()
        assert (await running.client.cache())["tiers"]["disk"]["state"] == "off"
        assert not tmp_path.exists()


async def test_without_a_store_the_service_works_and_says_so(home: Path) -> None:
    models = FakeModels()
    models.store.error = StoreUnavailableError("/kv is on a network file system (nfs).")
    async with running_service(models) as running:
        await running.ready()
        chat_id = await talk(running)
        status = await running.client.status()
        said = "Chats are saved, but resume quickly only while the service runs: /kv is on a network file system (nfs)."
        assert status["notices"] == [said]
        cache = await running.client.cache()
        assert (cache["tiers"]["disk"]["state"], cache["tiers"]["disk"]["notice"]) == ("memory_only", said)
        assert cache["chats"][0]["runs"][0][0] == "device"
        assert cache["tiers"]["device"]["hit_tokens_24h"] == 7
        assert cache["computed_tokens_24h"] > 0
        assert (await running.client.forget_cache(chat_id))["num_removed"] > 0
        with pytest.raises(Exception, match="network file system"):
            await running.client.prune_cache()
        with pytest.raises(Exception, match="network file system"):
            await anext(running.client.verify_cache())


async def test_a_fault_in_the_store_is_no_fault_of_the_service(home: Path) -> None:
    models = FakeModels()
    models.store.error = ZeroDivisionError("oh")
    async with running_service(models) as running:
        await running.ready()
        assert (await running.client.status())["tiers"]["disk"]["state"] == "memory_only"
        assert (await running.complete("say hi")).status_code == 200


async def test_the_socket_answers_while_the_store_opens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModels()
    may_open = threading.Event()
    really_open = models.store.open

    def slow(*arguments: Any) -> Any:
        assert may_open.wait(20)
        return really_open(*arguments)

    monkeypatch.setattr(models.store, "open", slow)
    async with running_service(models) as running:
        status = await running.client.status()
        assert (status["tiers"]["disk"]["state"], status["model"]["state"]) == ("opening", "loading")
        may_open.set()
        await running.ready()
        assert (await running.client.status())["tiers"]["disk"]["state"] == "on"


async def test_size_and_key_are_given_to_the_store(home: Path) -> None:
    models = FakeModels()
    async with running_service(models, kv_disk_bytes=64 << 20, kv_encryption=True) as running:
        await running.ready()
        assert models.store.quota_bytes == 64 << 20
        key_file = running.paths.kv_key_file
        assert models.store.master_key == key_file.read_bytes()
        assert len(key_file.read_bytes()) == 32
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert (await running.client.status())["tiers"]["disk"]["limit_bytes"] == 64 << 20
    async with running_service(models):
        await until(lambda: models.store.hooks is not None)
        assert models.store.master_key is None
        assert models.store.quota_bytes == int(running.paths.kv_quota_file.read_text())


async def test_blocks_whose_owner_rows_are_lost_do_not_stay(home: Path) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        await talk(running)
    tier = models.store.tiers[b"fake"]
    assert tier.hashes
    async with running_service(models) as running:
        await running.ready()
        assert tier.hashes, "the same chats own them"
    Paths.from_env().chats_db.unlink()
    async with running_service(models) as running:
        await running.ready()
        assert not tier.hashes
        assert models.store.num_clears == 1


async def test_a_block_is_owned_before_it_can_be_seen_and_not_stored_for_a_deleted_chat(running: Running) -> None:
    hooks = running.models.store.hooks
    assert hooks is not None
    chat = await running.client.create_chat()
    await asyncio.to_thread(hooks.on_owned, b"other", [(chat["id"], b"h" * 16), ("", b"i" * 16)])
    owned = await running.service.chats.run(lambda store: store.owned_blocks(chat["id"]))
    assert owned[b"other"].owned == {b"h" * 16}
    await running.client.delete_chat(chat["id"])
    with pytest.raises(OwnersGoneError, match="deleted"):
        await asyncio.to_thread(hooks.on_owned, b"other", [(chat["id"], b"h" * 16)])


async def test_pins_of_models_that_are_not_loaded_are_known_to_the_store(running: Running) -> None:
    hooks = running.models.store.hooks
    assert hooks is not None
    chat_id = await talk(running)
    hashes = set(running.models.store.tiers[b"fake"].hashes)
    assert await asyncio.to_thread(hooks.pinned_in, b"fake") == set()
    await running.client.update_chat(chat_id, {"is_pinned": True})
    assert await asyncio.to_thread(hooks.pinned_in, b"fake") == hashes

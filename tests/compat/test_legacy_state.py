"""The mesh that a legacy API uses: bound, selected, in several threads, closed and destroyed."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from ranks import fake_world

import namedmesh
from namedmesh import MeshError, NamedMesh
from namedmesh.compat import megatron
from namedmesh.compat.megatron import parallel_state

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_GLOO: dict[str, Any] = {"create_gloo_process_groups": False}
tp_size = parallel_state.get_tensor_model_parallel_world_size


@pytest.fixture
def meshes() -> Iterator[tuple[NamedMesh, NamedMesh]]:
    """Two meshes of a fake world that were bound to Megatron, the second one last."""
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        for mesh in (first, second):
            megatron.bind(mesh, **NO_GLOO)
        yield first, second
        megatron.unbind()
        parallel_state.destroy_model_parallel()
        for mesh in (first, second):
            mesh.close()


def bind(mesh: NamedMesh) -> megatron.BindingContext:
    """Bind a mesh again, with the same options."""
    return megatron.bind(mesh, **NO_GLOO)


def test_a_selected_mesh_takes_precedence_over_the_bound_one(meshes: tuple[NamedMesh, NamedMesh]) -> None:
    first, second = meshes
    assert megatron.current_mesh() is second
    parallel_state._PIPELINE_GLOBAL_RANKS = "patched"
    with first:
        assert tp_size() == 2
        assert parallel_state._PIPELINE_GLOBAL_RANKS == [5]
        bind(first)  # takes effect when no mesh is selected any more
    assert megatron.current_mesh() is first
    with second:
        # A value that was assigned belongs to the mesh at that time.
        assert parallel_state._PIPELINE_GLOBAL_RANKS == "patched"
    unbound = namedmesh.init_mesh(dp=8, device="cpu")
    with unbound, pytest.raises(AssertionError, match="is not initialized"):
        tp_size()
    with unbound, pytest.raises(AssertionError, match="already initialized"):
        parallel_state.initialize_model_parallel(2, **NO_GLOO)
    unbound.close()


def test_a_mesh_stays_selected_until_the_last_thread_leaves_it(
    meshes: tuple[NamedMesh, NamedMesh],
) -> None:
    """All threads of a process share the selection."""
    first, second = meshes
    seen: list[int] = []

    def record_tp_size() -> None:
        with first:
            seen.append(tp_size())

    with first:
        thread = Thread(target=record_tp_size)
        thread.start()
        thread.join()
        seen.append(tp_size())
    assert [*seen, tp_size()] == [2, 2, 4]
    assert megatron.current_mesh() is second


def test_the_end_of_a_binding_restores_the_binding_before(meshes: tuple[NamedMesh, NamedMesh]) -> None:
    first, second = meshes
    with bind(first):
        assert tp_size() == 2
        with bind(second):
            assert tp_size() == 4
        assert tp_size() == 2
    assert megatron.current_mesh() is second
    with bind(first):
        bind(second)
        # The mesh of the block stays selected until its end.
        assert tp_size() == 2
    assert megatron.current_mesh() is second
    bind(first)
    with bind(second):
        first.close()
        assert tp_size() == 4
    assert not parallel_state.is_initialized()


def test_destroy_forgets_all_meshes_and_closes_no_bound_mesh(
    meshes: tuple[NamedMesh, NamedMesh],
) -> None:
    first, second = meshes
    with first:
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()
    assert not parallel_state.is_initialized()
    assert not first.closed
    assert not second.closed
    with second, pytest.raises(MeshError, match="is not bound to a mesh"):
        megatron.current_mesh()
    with bind(first):
        assert tp_size() == 2  # its groups still exist


def test_a_closed_mesh_is_not_used_any_more(meshes: tuple[NamedMesh, NamedMesh]) -> None:
    first, second = meshes
    with first:
        first.close()
        assert not parallel_state.is_initialized()
    assert megatron.current_mesh() is second
    megatron.unbind()
    assert not parallel_state.is_initialized()
    parallel_state._PIPELINE_GLOBAL_RANKS = "without a mesh"
    with second:
        assert vars(parallel_state)["_PIPELINE_GLOBAL_RANKS"] is None
    assert parallel_state._PIPELINE_GLOBAL_RANKS == "without a mesh"

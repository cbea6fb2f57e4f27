"""What a role holds goes to the host between updates and comes back, in layouts whose shards lie on several meshes."""

import pytest

from spmd_rl.distributed import World
from spmd_rl.model.load import local
from spmd_rl.train.offload import Offload
from tests.dist.harness import run_ranks
from tests.dist.test_train_state import digest
from tests.models import EXPERTS, tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, share_of


def with_and_without(world: World, path: str, axes: dict[str, int]) -> list[str]:
    """The state after two updates, the second time with everything on the host in between."""
    found = []
    for moves in (False, True):
        mine = backend(world, path, axes=axes, optimizer="muon")
        state = [tensor for part in mine.model.state_dict().values() for tensor in part.values()]
        moved = Offload(state)
        for seed in (0, 1):
            if moves:
                moved.changed()
                moved.to_host()
                assert not any(local(tensor).untyped_storage().nbytes() for tensor in state)
                moved.to_device()
            mine.update(share_of(mine, "dealt", global_batch(seed)), loss, TEMPERATURE)
        found.append(digest(mine))
    return found


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ep": 2}, {"pp": 2}], ids=str)
def test_a_round_trip_to_the_host_changes_no_bit(axes: dict[str, int], tmp_path) -> None:
    kind = "qwen3_moe" if "ep" in axes else "qwen3"
    path = str(tiny(kind, tmp_path, **EXPERTS.get(kind, {})))
    for still, moved in run_ranks(2, with_and_without, path, axes):
        assert still == moved

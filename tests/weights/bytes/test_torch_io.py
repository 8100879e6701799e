import pytest
import torch

from slipstream.errors import WeightsError
from slipstream.weights.bytes.torch_io import gather, to_torch
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import layout


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None])
def test_a_model_arrives_bit_for_bit_in_the_wire_dtype(dtype, tmp_path):
    model = Tiny()
    gathered = gather(model.state_dict(), dtype)
    publisher = ShmPublisher("torch", 1, layout(gathered.tensors, gathered.tied), directory=tmp_path)
    weights = ShmSubscriber(directory=tmp_path).fetch(publisher.publish(0, gathered.tensors))
    arrived = to_torch(weights)
    assert arrived.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        want = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert arrived[name].dtype == want.dtype
        assert torch.equal(arrived[name], want)
    publisher.close()


def test_tied_names_are_found_and_stay_one_tensor(tmp_path):
    gathered = gather(Tiny().state_dict(), torch.bfloat16)
    assert gathered.tied == {"head.weight": "embed.weight"}
    publisher = ShmPublisher("tied", 1, layout(gathered.tensors, gathered.tied), directory=tmp_path)
    arrived = to_torch(ShmSubscriber(directory=tmp_path).fetch(publisher.publish(0, gathered.tensors)))
    assert arrived["head.weight"].data_ptr() == arrived["embed.weight"].data_ptr()
    publisher.close()


def test_a_head_that_came_untied_is_named_instead_of_staying_old(tmp_path):
    model = Tiny()
    gathered = gather(model.state_dict())
    publisher = ShmPublisher("untied", 1, layout(gathered.tensors, gathered.tied), directory=tmp_path)
    model.head.weight = torch.nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(WeightsError, match=r"head.weight is given as a tensor and as tied"):
        publisher.publish(0, gather(model.state_dict()).tensors)
    publisher.close()


def test_tensors_outlive_the_release_and_later_versions(tmp_path):
    model = Tiny()
    gathered = gather(model.state_dict())
    publisher = ShmPublisher("kept", 1, layout(gathered.tensors, gathered.tied), directory=tmp_path)
    weights = ShmSubscriber(directory=tmp_path).fetch(publisher.publish(0, gathered.tensors))
    kept, before = to_torch(weights)["embed.weight"], model.embed.weight.detach().clone()
    weights.release()
    for version in (1, 2, 3):
        with torch.no_grad():
            model.embed.weight.add_(1.0)
        publisher.publish(version, gathered.tensors)
        publisher.retire(version)
    assert torch.equal(kept, before)
    publisher.close()


def test_strided_views_and_slices_of_one_memory_are_no_ties():
    base = torch.arange(12.0).reshape(3, 4)
    gathered = gather({"rows": base, "columns": base.T, "first": base[0]})
    assert gathered.tied == {}
    assert list(gathered.tensors) == ["rows", "columns", "first"]


def test_a_meta_tensor_is_named():
    with pytest.raises(WeightsError, match="w is on the meta device"):
        gather({"w": torch.empty(2, device="meta")})

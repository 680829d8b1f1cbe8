"""AmoebaNet: what the paper counts, and how what evolution found is put together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpipe.models import amoebanet_b, amoebanet_d
from gpipe.recipes.models.amoebanet import FactorizedReduction

Build = Callable[..., list[nn.Module]]
BOTH = pytest.mark.parametrize("build", [amoebanet_d, amoebanet_b])


def parameters(build: Build, *sizes: int, **options: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for layer in build(*sizes, **options) for p in layer.parameters())


def test_counts_of_parameters() -> None:
    for build, layers, filters, classes, count in (
        (amoebanet_d, 3, 16, 10, 99_503),
        (amoebanet_d, 18, 208, 1000, 81_137_437),
        (amoebanet_d, 72, 512, 1000, 1_842_610_248),
        (amoebanet_b, 3, 16, 10, 125_803),
        (amoebanet_b, 18, 512, 1000, 557_277_864),  # the paper prints 557M
        (amoebanet_b, 18, 512, 1001, 557_286_057),
    ):
        assert parameters(build, layers, filters, classes) == count
    for layers, filters, count in (  # Table 1 prints 82M, 318M, 542M, 1.05B and 1.8B
        (18, 208, 81_781_529),
        (18, 416, 318_270_652),
        (18, 544, 540_977_420),
        (36, 544, 1_054_074_956),
        (72, 512, 1_843_378_372),
    ):
        assert parameters(amoebanet_d, layers, filters, 1000, aux_head=True) == count
    small, large = (parameters(amoebanet_b, 18, 512, 1000, aux_head=True, image_size=size) for size in (224, 480))
    assert large - small == 51 * 307 * (9 * 9 - 4 * 4)
    with torch.device("meta"):
        network = amoebanet_d(18, 208)
    assert sum(b.numel() for layer in network for b in layer.buffers() if b.dim()) == 166_126


@pytest.mark.parametrize(
    ("build", "filters", "image", "billions"), [(amoebanet_d, 256, 224, 14.194), (amoebanet_b, 512, 480, 298.794)]
)
def test_multiplications_of_a_forward(build: Build, filters: int, image: int, billions: float) -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        nn.Sequential(*build(18, filters))(torch.empty(1, 3, image, image))
    assert round(counter.get_total_flops() / 2e9, 3) == billions


def outputs(network: list[nn.Module], image: Tensor) -> list[Tensor]:
    """What each layer gives, without the skip; none changes what it reads."""
    states: list[Tensor] = []
    state: Tensor | tuple[Tensor, ...] = image
    for layer in network:
        read = [state] if isinstance(state, Tensor) else list(state)
        versions = [x._version for x in read]
        state = layer(state)
        assert [x._version for x in read] == versions
        states.append(state if isinstance(state, Tensor) else state[0])
    return states


@BOTH
@pytest.mark.parametrize(
    ("image", "sizes"),
    [
        (224, [111, 56, 28, 28, 28, 14, 14, 14, 7, 7, 7]),
        (299, [149, 75, 38, 38, 38, 19, 19, 19, 10, 10, 10]),
        (480, [239, 120, 60, 60, 60, 30, 30, 30, 15, 15, 15]),
    ],
)
def test_images_shrink_and_channels_grow(build: Build, image: int, sizes: list[int]) -> None:
    with torch.device("meta"):
        *features, logits = outputs(build(6, 32, 7), torch.empty(2, 3, image, image))
        assert [len(build(layers, 16)) for layers in (3, 4, 5, 18, 36)] == [9, 10, 11, 24, 42]
    assert [x.shape[2:] for x in features] == [(size, size) for size in sizes]
    states = 3 if build is amoebanet_d else 2  # that a reduction cell concatenates; a normal one has 4
    filters = [8, 16, 32, 32, 64, 64, 64, 128, 128, 128]
    factors = [states, states, 4, 4, states, 4, 4, states, 4, 4]
    assert [x.shape[1] for x in features] == [32, *(f * n for f, n in zip(filters, factors, strict=True))]
    assert logits.shape == (2, 7)


@BOTH
@pytest.mark.parametrize("filters", [32, 34])  # of 34, the second reduction has 17: an odd number to share out
def test_every_parameter_learns(build: Build, filters: int) -> None:
    torch.manual_seed(0)
    layers = build(3, filters, 10)
    *_, logits = outputs(layers, torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, 10)
    F.cross_entropy(logits, torch.tensor([3, 7])).backward()
    named = nn.Sequential(*layers).named_parameters()
    assert [name for name, p in named if p.grad is None or not p.grad.any()] == []


def test_a_factorized_reduction_sees_every_pixel() -> None:
    torch.manual_seed(0)
    reduction = FactorizedReduction(3, 8).eval()
    for size in (6, 7):
        image = torch.rand(1, 3, size, size, requires_grad=True)
        halved = reduction(image)
        assert halved.shape == (1, 8, (size + 1) // 2, (size + 1) // 2)
        halved.abs().sum().backward()
        assert image.grad is not None
        seen = image.grad[0].abs().sum(dim=0) > 0
        rows = torch.arange(size) % 2
        assert torch.equal(seen, rows[:, None] == rows[None, :])


def test_auxiliary_logits_come_in_training_only_and_their_head_only_adds_names() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*amoebanet_d(3, 16, 10, aux_head=True, image_size=96))
    images = torch.randn(2, 3, 96, 96)
    logits, auxiliary = network(images)
    assert logits.shape == auxiliary.shape == (2, 10)
    auxiliary.sum().backward()
    reached = [i for i, layer in enumerate(network) if any(p.grad is not None for p in layer.parameters())]
    assert reached == [0, 1, 2, 3, 4, 5]  # up to the last cell before the second reduction
    assert network.eval()(images).shape == (2, 10)
    plain = nn.Sequential(*amoebanet_d(3, 16, 10)).state_dict()
    assert [name for name in network.state_dict() if ".auxiliary." not in name] == list(plain)


def test_too_small_a_network_or_image_is_refused() -> None:
    for layers, filters in ((2, 16), (3, 8)):
        with pytest.raises(ValueError, match=f"layers={layers}, filters={filters} are too small"):
            amoebanet_d(layers, filters)
    with torch.device("meta"):
        amoebanet_d(3, 16, aux_head=True, image_size=67)
        with pytest.raises(ValueError, match="image_size=66 is too small"):
            amoebanet_d(3, 16, aux_head=True, image_size=66)

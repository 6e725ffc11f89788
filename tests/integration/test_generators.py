"""``torch.Generator(device="xla")`` and ``generator=``: streams of their own."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import xla_dtensor as xd

DRAWS = {
    "randn": lambda g: torch.randn(4, 3, device="xla", generator=g),
    "rand": lambda g: torch.rand(5, device="xla", generator=g),
    "randint": lambda g: torch.randint(0, 1000, (6,), device="xla", generator=g),
    "randperm": lambda g: torch.randperm(9, device="xla", generator=g),
    "normal_": lambda g: torch.zeros(4, device="xla").normal_(generator=g),
    "uniform_": lambda g: torch.zeros(4, device="xla").uniform_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((64,), 0.5, device="xla"), generator=g),
    "bernoulli_": lambda g: torch.zeros(64, device="xla").bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(50, device="xla"), 5, generator=g),
    "exponential_": lambda g: torch.zeros(4, device="xla").exponential_(generator=g),
    "init": lambda g: nn.init.trunc_normal_(torch.zeros(9, device="xla"), generator=g),
    "kaiming": lambda g: nn.init.kaiming_uniform_(torch.zeros(3, 3, device="xla"), generator=g),
}


def generator(seed=3):
    return torch.Generator(device="xla").manual_seed(seed)


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_says_what_comes(name):
    draw = DRAWS[name]
    g = generator()
    first, second = draw(g).tolist(), draw(g).tolist()
    assert first != second
    assert draw(generator()).tolist() == first
    assert draw(generator(4)).tolist() != first


@pytest.mark.parametrize("name", DRAWS)
def test_it_and_the_default_stream_leave_each_other_alone(name):
    draw = DRAWS[name]
    torch.manual_seed(0)
    alone = [draw(None).tolist() for _ in range(2)]
    torch.manual_seed(0)
    g = generator()
    first = draw(g).tolist()
    mixed = [draw(None).tolist()]
    second = draw(g).tolist()
    mixed.append(draw(None).tolist())
    assert mixed == alone
    g = generator()
    assert [draw(g).tolist(), draw(g).tolist()] == [first, second]


def test_the_numbers_are_those_of_the_default_stream_with_that_seed():
    torch.manual_seed(11)
    expected = torch.randn(4, 4, device="xla").tolist()
    assert torch.randn(4, 4, device="xla", generator=generator(11)).tolist() == expected


def test_placements_do_not_change_the_numbers(mesh_2x4):
    plain = torch.zeros(8, 8, device="xla").normal_(generator=generator()).tolist()
    sharded = xd.distribute_tensor(torch.zeros(8, 8), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    assert sharded.normal_(generator=generator()).full_tensor().tolist() == plain


def test_state_is_saved_restored_and_copied():
    g = generator()
    torch.randn(3, device="xla", generator=g)
    state = g.get_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    copies = [g.clone_state(), copy.copy(g), copy.deepcopy(g), pickle.loads(pickle.dumps(g))]
    file = io.BytesIO()
    torch.save({"rng": g.get_state()}, file)
    file.seek(0)
    copies.append(torch.Generator("xla").set_state(torch.load(file)["rng"]))
    expected = torch.randn(3, device="xla", generator=g).tolist()
    assert [torch.randn(3, device="xla", generator=c).tolist() for c in copies] == [expected] * 5
    g.set_state(state)
    assert torch.randn(3, device="xla", generator=g).tolist() == expected
    with pytest.raises(ValueError, match="uint8 tensor of 16 elements"):
        g.set_state(torch.zeros(3))


def test_what_it_says_of_itself():
    g = torch.Generator(device=torch.device("xla"))
    assert isinstance(g, torch.Generator) and g.device == torch.device("xla:0")
    assert g.manual_seed(-1) is g and g.initial_seed() == 2**64 - 1
    assert g.seed() == g.initial_seed() != g.seed()


def test_generators_of_the_cpu_are_torchs():
    assert type(torch.Generator()) is type(torch.default_generator) is torch._C.Generator
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    g = torch.Generator("cpu").manual_seed(5)
    torch.manual_seed(5)
    assert torch.randn(3, generator=g).tolist() == torch.randn(3).tolist()
    loader = torch.utils.data.DataLoader(range(8), shuffle=True, generator=g)
    assert sorted(int(x) for x in loader) == list(range(8))

    class Mine(torch.Generator):
        pass

    assert Mine().manual_seed(1).initial_seed() == 1


def test_of_another_device_it_is_refused():
    with pytest.raises(RuntimeError, match=r"randn.*found 'cpu'.*Generator\(device='xla'\)"):
        torch.randn(3, device="xla", generator=torch.Generator())
    with pytest.raises(xd.UnsupportedOpError, match="there is no device xla:1"):
        torch.Generator(device="xla:1")


def test_a_compiled_step_refuses_it_and_leaves_it_alone():
    g = generator()
    before = g.get_state()

    @xd.compile
    def step(x):
        return x + torch.randn(3, device="xla", generator=g)

    with pytest.raises(xd.DataDependentError, match=r"generator=.*torch\.manual_seed"):
        step(torch.zeros(3, device="xla"))
    assert torch.equal(g.get_state(), before)

    @xd.compile
    def seeding(x):
        g.manual_seed(4)
        return x + 1

    with pytest.raises(xd.DataDependentError, match="generator's new seed"):
        seeding(torch.zeros(3, device="xla"))
    assert torch.equal(g.get_state(), before)


def test_a_failed_draw_takes_nothing():
    g = generator()
    state = g.get_state()
    with pytest.raises(RuntimeError, match=r"cannot sample n_sample > prob_dist\.size"):
        torch.multinomial(torch.ones(3, device="xla"), 5, generator=g)
    assert torch.equal(g.get_state(), state)


def test_threads_share_a_generator():
    g, drawn = generator(), []

    def draw():
        for _ in range(20):
            x = torch.randn(2, device="xla", generator=g)
            drawn.append(tuple(x.tolist()))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = generator()
    expected = {tuple(torch.randn(2, device="xla", generator=alone).tolist()) for _ in range(80)}
    assert set(drawn) == expected and len(expected) == 80

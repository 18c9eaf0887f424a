"""The schedules, Adam, and averages of weights."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_vanilla.errors import InputError
from modeling_vanilla.optimization import (
    ExponentialMovingAverage,
    average,
    average_checkpoints,
    fitted_schedule,
    gradient_norm,
    optimizer,
    paper_schedule,
    schedule_warnings,
)


class Tied(nn.Module):
    """An embedding, a projection tied to it, and a tensor that is not a floating point one."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.inner = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embed(ids))))


def write_folder(folder, weights):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes far apart, where the order of additions shows.
    scale = 10.0 ** torch.randint(-12, 12, (300,), generator=generator)
    return {"w": (torch.randn(300, generator=generator) * scale).to(dtype), "steps": torch.tensor(seed)}


def test_paper_schedule_is_equation_3():
    for n in range(1, 20_001):
        expected = (n / 4000 if n < 4000 else math.sqrt(4000 / n)) / math.sqrt(512 * 4000)
        assert paper_schedule(n, 512) == pytest.approx(expected, rel=1e-12)
    assert paper_schedule(4000, 512) == pytest.approx(6.99e-4, abs=5e-7)
    assert paper_schedule(10, 128, warmup_steps=20, lr_factor=2.5) == pytest.approx(2.5 * 128**-0.5 * 10 * 20**-1.5)
    with pytest.raises(ValueError, match="count from 1"):
        paper_schedule(0, 512)


def test_fitted_schedule_has_the_paper_s_warm_up_and_peak_and_a_line_to_zero():
    rates = [fitted_schedule(n, 1000, 256, warmup_steps=200) for n in range(1, 1002)]
    assert rates[:200] == pytest.approx([paper_schedule(n, 256, 200) for n in range(1, 201)])
    steps = [later - earlier for earlier, later in itertools.pairwise(rates[199:])]
    assert steps == pytest.approx([-rates[199] / 801] * 801)
    assert rates[999] > 0 and rates[1000] == 0 and fitted_schedule(5000, 1000, 256) == 0


def test_a_fitted_warm_up_takes_at_most_a_quarter_of_the_run():
    rates = [fitted_schedule(n, 400, 512, warmup_steps=4000) for n in range(1, 401)]
    assert rates.index(max(rates)) == 99
    assert max(rates) == pytest.approx(paper_schedule(4000, 512))
    assert fitted_schedule(1, 1, 512) == pytest.approx(paper_schedule(4000, 512))


def test_schedule_warnings_name_the_flag():
    assert schedule_warnings(100_000, 512) == []
    assert schedule_warnings(8000, 128, warmup_steps=2000, lr_factor=2.53) == []
    (short,) = schedule_warnings(500, 512)
    assert "--warmup_steps 4000" in short and "500 updates" in short and "8.73e-05" in short
    (steep,) = schedule_warnings(10_000, 512, warmup_steps=4000, lr_factor=100)
    assert "6.99e-02" in steep and "--lr_factor 100" in steep
    (brief,) = schedule_warnings(10_000, 512, warmup_steps=10)
    assert "--warmup_steps 10" in brief
    (fitted,) = schedule_warnings(500, 512, fitted=True)
    assert "shortened to 125" in fitted


def test_optimizer_is_the_paper_s_adam():
    fast, plain = Tied(), Tied()
    adam = optimizer(fast, lr=1e-3)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9, foreach=False)
    assert adam.defaults["weight_decay"] == 0
    ids = torch.arange(7)
    for _ in range(10):
        for model, step in ((fast, adam), (plain, reference)):
            step.zero_grad()
            nn.functional.cross_entropy(model(ids), ids).backward()
            step.step()
    torch.testing.assert_close(fast.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_gradient_norm_shows_a_single_bad_value():
    model = Tied()
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number + 1.0)
    assert gradient_norm(model) == pytest.approx(math.sqrt(28 * 1 + 16 * 4 + 4 * 9))
    model.inner.bias.grad[2] = math.nan
    assert not gradient_norm(model).isfinite()
    model.inner.bias.grad[2] = -math.inf
    assert not gradient_norm(model).isfinite()


def test_average_is_the_mean_in_any_order_bit_for_bit():
    states = [random_state(seed) for seed in range(4)]
    for state, value in zip(states, (1e30, 1.0, -1e30, 3.0), strict=True):
        state["w"][0] = value  # even float64 sums these differently in another order
    results = [average(order)["w"] for order in itertools.permutations(states)]
    expected = torch.stack([state["w"].double() for state in states]).mean(dim=0).float()
    torch.testing.assert_close(results[0][1:], expected[1:], rtol=1e-6, atol=0)
    assert all(torch.equal(result, results[0]) for result in results)


def test_average_of_equals_is_the_same():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = random_state(1, dtype)
        state["w"] = state["w"].nan_to_num(posinf=1.0, neginf=1.0)
        result = average([state] * 3)
        assert torch.equal(result["w"], state["w"].float())


def test_average_of_half_precision_is_float32():
    low, high = (
        {"w": torch.tensor([1.0], dtype=torch.bfloat16)},
        {"w": torch.tensor([1.0078125], dtype=torch.bfloat16)},
    )
    assert average([low, high])["w"].tolist() == [1.00390625]  # bfloat16 would round this to one of the two


def test_average_keeps_ties_and_takes_integers_from_the_last():
    first, last = Tied(0), Tied(1)
    result = average([first.state_dict(), last.state_dict()])
    assert list(result) == list(last.state_dict())
    assert result["head.weight"] is result["embed.weight"]
    torch.testing.assert_close(result["embed.weight"], ((first.embed.weight + last.embed.weight) / 2).detach())
    assert result["count"] == 1
    last.load_state_dict(result)


def test_average_names_what_does_not_match(tmp_path):
    with pytest.raises(InputError, match=r"state dict 1: w has shape \(2,\), not \(3,\)"):
        average([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}])
    with pytest.raises(InputError, match="state dict 1: v is not in all"):
        average([{"w": torch.zeros(2), "v": torch.zeros(2)}, {"w": torch.zeros(2)}])
    with pytest.raises(InputError, match="no checkpoint"):
        average([])
    folder = write_folder(tmp_path / "checkpoint-1", random_state(0))
    with pytest.raises(InputError, match="checkpoint-2.model.safetensors does not exist"):
        average([folder, tmp_path / "checkpoint-2"])
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(InputError, match="checkpoint-1.model.safetensors is damaged"):
        average([folder])


def test_average_checkpoints_writes_a_complete_folder(tmp_path):
    states = [random_state(seed) for seed in range(3)]
    folders = [write_folder(tmp_path / f"checkpoint-{n}", state) for n, state in enumerate(states)]
    for name in ("config.json", "tokenizer.json", "modeling_vanilla.py", "trainer_state.json", "optimizer.bin"):
        for number, folder in enumerate(folders):
            (folder / name).write_text(f"{name} {number}")
    average_checkpoints(folders, tmp_path / "out" / "averaged")
    output = tmp_path / "out" / "averaged"
    written = sorted(path.name for path in output.iterdir())
    assert written == ["config.json", "model.safetensors", "modeling_vanilla.py", "tokenizer.json"]
    assert (output / "config.json").read_text() == "config.json 2"
    assert torch.equal(load_file(output / "model.safetensors")["w"], average(states)["w"])
    # The last checkpoint may itself be replaced.
    average_checkpoints(folders, folders[-1])
    assert torch.equal(load_file(folders[-1] / "model.safetensors")["w"], average(states)["w"])


def test_moving_average_follows_its_recursion_and_knows_tied_parameters_once():
    model = Tied()
    ema = ExponentialMovingAverage(model, decay=0.6)
    assert list(ema.average) == ["embed.weight", "inner.weight", "inner.bias"]
    expected = model.inner.weight.detach().double()
    for n in range(1, 16):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(model)
        decay = min(0.6, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.inner.weight.detach().double()
    torch.testing.assert_close(ema.average["inner.weight"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_average_is_lent_and_the_weights_come_back_bit_for_bit(dtype):
    model = Tied(dtype=dtype)
    ema = ExponentialMovingAverage(model, decay=0.9)
    with torch.no_grad():
        model.inner.weight.mul_(3)
    ema.update(model)
    assert ema.average["inner.weight"].dtype == torch.float32
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="evaluation failed"), ema.applied_to(model) as lent:
        assert lent is model and model.head.weight is model.embed.weight
        assert torch.equal(model.inner.weight, ema.average["inner.weight"].to(dtype))
        raise RuntimeError("evaluation failed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_moving_average_resumes_where_it_stopped(tmp_path):
    model = Tied()
    ema = ExponentialMovingAverage(model, decay=0.99)
    ema.update(model)
    torch.save(ema.state_dict(), tmp_path / "ema.pt")
    resumed = ExponentialMovingAverage(Tied(seed=3), decay=0.99)
    resumed.load_state_dict(torch.load(tmp_path / "ema.pt"))
    for average_ in (ema, resumed):
        average_.update(Tied(seed=5))
    assert resumed.updates == 2
    assert all(torch.equal(resumed.average[name], tensor) for name, tensor in ema.average.items())
    with pytest.raises(ValueError, match="another model"):
        resumed.load_state_dict({"updates": 1, "average": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match="decay"):
        ExponentialMovingAverage(model, decay=1.0)

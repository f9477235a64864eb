"""The loss of a train step is a plain tensor; calling its ``backward`` says that the step has done that."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import noise, sgd, square


@pytest.fixture(scope="module")
def step() -> roamc.TrainStep:
    torch.manual_seed(2)
    model = nn.Linear(8, 8)
    return roamc.train_step(model, square, sgd(model))


def saved(loss: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)["loss"]
    return loaded


def test_backward_says_what_to_remove(step: roamc.TrainStep) -> None:
    with pytest.raises(
        roamc.BackwardTwiceError, match=r"has run backward .*: remove backward\(\), step\(\) and"
    ) as error:
        step(noise(4, 8)).backward(retain_graph=True)
    assert isinstance(error.value, RuntimeError), "as torch raises"


def test_pickles_and_text_are_those_of_any_tensor(step: roamc.TrainStep) -> None:
    loss = step(noise(4, 8))
    assert type(loss) is Tensor
    assert not loss.requires_grad
    for pickled in (pickle.dumps(loss), pickle.dumps(copy.copy(loss)), pickle.dumps(copy.deepcopy(loss))):
        assert b"roamc" not in pickled
    assert repr(loss) == repr(loss.clone())


def test_a_loss_is_freed_as_soon_as_nobody_holds_it(step: roamc.TrainStep) -> None:
    loss = step(noise(4, 8))
    alive = weakref.ref(loss)
    del loss
    assert alive() is None


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "saved": saved,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),  # type: ignore[no-any-return]
    "compile": lambda loss: torch.compile(torch.clone, backend="eager")(loss),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_loss_have_its_bits(step: roamc.TrainStep, copied: Callable[[Tensor], Tensor]) -> None:
    loss = step(noise(4, 8))
    other = copied(loss)
    assert type(other) is Tensor
    assert other.equal(loss)


@pytest.mark.parametrize("name", ["copy", "deepcopy", "pickle"])
def test_copies_of_a_loss_have_what_users_have_set_on_it(step: roamc.TrainStep, name: str) -> None:
    loss = step(noise(4, 8))
    loss.weight = [3]  # type: ignore[attr-defined]
    other = COPIES[name](loss)
    assert vars(other)["weight"] == [3]
    assert other.equal(loss)
    with pytest.raises(roamc.BackwardTwiceError):
        loss.backward()


def test_backward_of_a_deep_copy_is_that_of_the_copy(step: roamc.TrainStep) -> None:
    loss = step(noise(4, 8)).requires_grad_()
    other = copy.deepcopy(loss)
    other.backward()
    assert loss.grad is None
    assert other.grad is not None
    with pytest.raises(RuntimeError, match="does not require grad"):
        copy.deepcopy(step(noise(4, 8))).backward()
    with pytest.raises(roamc.BackwardTwiceError):
        step(noise(4, 8)).backward()


def test_a_loss_that_requires_a_gradient_is_torchs(step: roamc.TrainStep) -> None:
    loss = step(noise(4, 8)).requires_grad_()
    loss.backward()
    assert loss.grad is not None
    assert loss.grad.item() == 1

"""Models of transformers by their configuration: ``roamc plan path/to/config.json --batch 4 --seq 2048 --lora r=16``.

No weight is needed: the model is built with random ones on the meta device. Nothing is downloaded, and no code that a
configuration names is run. A task says what the batch is:

    task                       batch                                                         Auto class
    causal-lm                  input_ids, labels                                             AutoModelForCausalLM
    masked-lm, seq2seq-lm      input_ids, attention_mask, labels                             AutoModelForMaskedLM, ...
    ...-classification         input_ids, attention_mask, labels (one each, or one a token)
    image-classification       pixel_values, labels (one each)
    question-answering         input_ids, attention_mask, start_positions, end_positions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from roamc import decode, files
from roamc.cli import lora
from roamc.cli.models import TASK_NAMES, Settings, check_task, in_range
from roamc.cli.zoo import DTYPES, transformers_of
from roamc.errors import OptionError, nearest
from roamc.frontends.own_loss import returned_loss
from roamc.frontends.workload import Workload
from roamc.settings import Setting

LONGEST = 2048
"""Length of a sequence if none is asked for, as far as the model has places for so many tokens."""

LONGEST_FILE = 1 << 24
"""Bytes of a configuration's file."""

_OWN = ("batch", "seq", "dtype", "task", "lora", "attention_mask")
"""Settings that are not fields of the configuration."""

_FIELDS = {"width": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size", "image": "image_size"}
"""Settings that have a name of their own on the command line, and their fields."""

_LAYERS = (("encoder_layers", "decoder_layers"), ("num_hidden_layers", "num_decoder_layers"))
"""Fields of the setting "layers": those that there are of the first pair of which a configuration has the first."""


@dataclass(frozen=True)
class Task:
    """What a model is trained for.

    Attributes:
        auto: end of the name of transformers' Auto class.
        batch: from the shape (batch, seq), the configuration and whether padding is masked to the keyword arguments of
            the model, labels among them.
        masked: whether batches are padded, and the mask that says so is part of them, if nobody says otherwise.
    """

    auto: str
    batch: Callable[[tuple[int, int], Any], dict[str, Tensor]]
    masked: bool = True


def _ids(config: Any, *shape: int) -> Tensor:
    """Token numbers with values, as models look at them: none is that of padding."""
    return torch.full(shape, int(getattr(config, "pad_token_id", None) == 0), dtype=torch.long, device="cpu")


def _tokens(shape: tuple[int, int], config: Any) -> dict[str, Tensor]:
    return {"input_ids": _ids(config, *shape), "labels": _ids(config, *shape)}


def _texts(shape: tuple[int, int], config: Any) -> dict[str, Tensor]:
    return {"input_ids": _ids(config, *shape), "labels": _ids(config, shape[0])}


def _answers(shape: tuple[int, int], config: Any) -> dict[str, Tensor]:
    positions = {"start_positions": _ids(config, shape[0]), "end_positions": _ids(config, shape[0])}
    return {"input_ids": _ids(config, *shape), **positions}


def _images(shape: tuple[int, int], config: Any) -> dict[str, Tensor]:
    side = getattr(config, "image_size", 224)
    sides = list(side) if isinstance(side, list | tuple) else [side, side]
    if len(sides) != 2 or any(type(each) is not int or each < 1 for each in sides):
        raise OptionError(f"image_size must be one or two whole numbers from 1, not {side!r}")
    height, width = sides
    pixels = torch.zeros(shape[0], getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": _ids(config, shape[0])}


_TASKS = (
    Task("Seq2SeqLM", _tokens),
    Task("MaskedLM", _tokens),
    Task("CausalLM", _tokens, masked=False),
    Task("ImageClassification", _images, masked=False),
    Task("SequenceClassification", _texts),
    Task("TokenClassification", _tokens),
    Task("QuestionAnswering", _answers),
)

TASKS: dict[str, Task] = dict(zip(TASK_NAMES, _TASKS, strict=True))
"""Each task by its name."""


def make(target: str, settings: Settings) -> Workload:
    """Build the model of a configuration on the meta device, in training mode, with its batch and loss.

    Args:
        target: path of a folder with ``config.json``, or of a ``.json`` file.
        settings: :data:`_OWN`, layers, :data:`_FIELDS`, and fields of the configuration, which they override.

    Raises:
        OptionError: there is no such configuration, transformers has no class for it or refuses it, a setting is
            unknown or out of range, or transformers (or peft, for ``lora``) is missing.
    """
    data = _read(target)
    transformers = transformers_of("a configuration")
    own = {key: value for key, value in settings.items() if key in _OWN}
    fields = {key: value for key, value in settings.items() if key not in _OWN}
    with _offline():
        config = _config(transformers, target, data, fields)
        name = _task(transformers, target, config, own.get("task"))
        dtype = _dtype(target, config, own.get("dtype"))
        shape = (in_range("batch", own.get("batch", 1)), _length(target, config, own.get("seq")))
        with torch.device("meta"):
            model = _built(transformers, target, config, TASKS[name], dtype)
            kind = type(model).__name__
            if "lora" in own:
                model = lora.added(model, str(own["lora"]))
            batch = _batch(TASKS[name], shape, config, dtype, own.get("attention_mask", TASKS[name].masked))
    sizes = f"batch {shape[0]}" + (f", sequence length {shape[1]}" if "input_ids" in batch else "")
    adapters = f", LoRA with {own['lora']}" if "lora" in own else ""
    note = f"{kind} for {name}: {sizes}, {str(dtype).removeprefix('torch.')}{adapters}"
    return Workload(f"{kind} of {target}", model.train(), (), returned_loss, named=batch, notes=(note,))


def _read(target: str) -> dict[str, Any]:
    """The content of a configuration's file, checked to be one of transformers."""
    path = Path(target)
    if path.is_dir():
        pipeline = (path / "model_index.json").is_file()
        path /= "config.json"
        if not path.is_file():
            raise OptionError(f"{target} {_DIFFUSERS if pipeline else 'has no config.json, and no log of TORCH_TRACE'}")
    content = files.read(path, LONGEST_FILE)
    try:
        data = decode.parse(content)
    except ValueError as error:
        raise OptionError(f"{path} is no JSON: {error}") from None
    if isinstance(data, dict) and ("_diffusers_version" in data or "_class_name" in data):
        raise OptionError(f"{path} {_DIFFUSERS}")
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise OptionError(f"{path} is no configuration of a transformers model: it has no model_type")
    if not isinstance(data.get("architectures") or [], list):
        raise OptionError(f"{path}: architectures must be a list of names, not {data['architectures']!r}")
    if "auto_map" in data:
        raise OptionError(
            f"{path} names code of its own (auto_map), which roamc does not run: write a function that builds the "
            f"model, FILE.py:FUNCTION, or delete auto_map if transformers' own {data['model_type']} is meant"
        )
    if "quantization_config" in data:
        raise OptionError(
            f"{path} has quantized weights (quantization_config), which are not planned: delete it to plan the model "
            "in its dtype"
        )
    return data


_DIFFUSERS = (
    "is of diffusers, not of a transformers model: write a function that builds the model, and plan FILE.py:FUNCTION"
)


def _offline() -> Any:
    """Context manager: whatever asks the Hub gets an error and no answer."""
    from huggingface_hub import constants

    return mock.patch.object(constants, "HF_HUB_OFFLINE", True)


def _config(transformers: Any, target: str, data: Mapping[str, Any], fields: Settings) -> Any:
    """The configuration, with ``fields`` in the place of its own."""
    classes = transformers.CONFIG_MAPPING
    kind = data["model_type"]
    if kind not in classes:
        raise OptionError(
            f"{target}: transformers {transformers.__version__} has no model type {kind!r}"
            f"{nearest(kind, classes.keys(), 0.8)} A newer transformers may have it"
        )
    plain = _accepted(target, lambda: classes[kind].from_dict(dict(data)))
    changes: dict[str, Any] = {}
    for key, value in fields.items():
        changes.update(dict.fromkeys(_names(target, plain, key), value))
    if "layers" in fields or "num_hidden_layers" in fields:
        changes.update(_kinds_of_layers(plain, changes))
    config = _accepted(target, lambda: classes[kind].from_dict({**data, **changes}))
    if "layers" in fields:
        in_range("layers", fields["layers"])
    for name in chain(*_LAYERS):
        count = getattr(config, name, None)
        if isinstance(count, int) and count < 0:  # range() has none then, and so has the model
            raise OptionError(f"{target}: {name} must be a whole number from 0, not {count}")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # whichever: of labels the decoder's inputs are made, behind this one
    return config


def _names(target: str, config: Any, key: str) -> tuple[str, ...]:
    """The fields of ``config`` that a setting is for."""
    pair = next((pair for pair in _LAYERS if hasattr(config, pair[0])), _LAYERS[-1])
    layers = pair if hasattr(config, pair[1]) else pair[:1]
    names = layers if key == "layers" else (_FIELDS.get(key, key),)
    aliases = config.attribute_map
    if not hasattr(config, names[0]):
        fields = [*_OWN, "layers", *_FIELDS, *config.to_dict()]
        raise OptionError(f"{target} has no field {names[0]!r}{nearest(names[0], fields)}")
    return tuple(aliases.get(name, name) for name in names)


def _kinds_of_layers(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The list that says of each layer what it is, for another number of layers; recomputed where it is too short."""
    kinds = getattr(config, "layer_types", None)
    count = next((value for name, value in changes.items() if "layer" in name), None)
    if not isinstance(kinds, list) or not isinstance(count, int):
        return {}
    return {"layer_types": kinds[:count] if count <= len(kinds) else None}


def _task(transformers: Any, target: str, config: Any, asked: Setting | None) -> str:
    """The name of the task: the one that is asked for, or that of the configuration's architecture, or the first."""
    classes = {name: _classes(transformers, task, config) for name, task in TASKS.items()}
    possible = [name for name, kinds in classes.items() if kinds]
    check_task(asked)
    if not possible:
        raise OptionError(
            f"{target}: transformers has no class of model type {config.model_type!r} for a task that roamc knows "
            f"({', '.join(TASKS)}): write a function that returns (model, batch), and plan FILE.py:FUNCTION"
        )
    if asked is not None and asked not in possible:
        raise OptionError(
            f"{target}: transformers has no class of model type {config.model_type!r} for {asked}; tasks that it has "
            f"one for: {', '.join(possible)}"
        )
    architecture = next(iter(config.architectures or ()), None)
    named = next((name for name in possible if architecture in classes[name]), None)
    if asked is None and named is None and architecture is not None:
        raise OptionError(
            f"{target} is of {architecture}, which has no loss that roamc knows: write a function that returns (model, "
            "batch), and plan FILE.py:FUNCTION; or plan another class: "
            f"{', '.join(f'--task {name} for {classes[name][0]}' for name in possible)}"
        )
    return str(asked or named or possible[0])


def _classes(transformers: Any, task: Task, config: Any) -> tuple[str, ...]:
    """Names of the classes that transformers has for a configuration and a task."""
    mapping = getattr(transformers, f"AutoModelFor{task.auto}")._model_mapping
    if type(config) not in mapping:
        return ()
    kinds = mapping[type(config)]
    return tuple(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def _dtype(target: str, config: Any, asked: Setting | None) -> torch.dtype:
    """The dtype of parameters: the one that is asked for, that of the configuration, or float32."""
    named = asked if asked is not None else config.dtype
    name = str(named if named is not None else "float32").removeprefix("torch.")
    if name not in DTYPES:
        where = "dtype" if asked is not None else f"{target}: dtype"
        raise OptionError(f"{where} must be one of {', '.join(DTYPES)}, not {name!r}{nearest(name, DTYPES)}")
    return DTYPES[name]


def _length(target: str, config: Any, asked: Setting | None) -> int:
    """The length of sequences, within what the model has places for."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        most = min(places, LONGEST) if isinstance(places, int) and places > 0 else 512
        return int(1 << (most.bit_length() - 1))  # a power of two: RoBERTa has 514 places, and skips the first two
    length = in_range("seq", asked)
    if isinstance(places, int) and length > places:
        raise OptionError(
            f"seq {length} is above the {places} places of {target}; --set max_position_embeddings={length} gives more"
        )
    return length


def _built(transformers: Any, target: str, config: Any, task: Task, dtype: torch.dtype) -> nn.Module:
    auto = getattr(transformers, f"AutoModelFor{task.auto}")
    model: nn.Module = _accepted(target, lambda: auto.from_config(config, dtype=dtype))
    if task.batch is _texts and config.problem_type is None and config.num_labels > 1:
        config.problem_type = "single_label_classification"  # else the first forward writes it there
    if task.batch is _texts and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # a decoder asks where a text ends
    return model


def _batch(task: Task, shape: tuple[int, int], config: Any, dtype: torch.dtype, masked: Setting) -> dict[str, Tensor]:
    """The keyword arguments of the model: those of the task, and if it is to be there a mask of padding."""
    batch = task.batch(shape, config)
    batch = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if not masked:
        return batch
    mask = torch.ones(shape, dtype=torch.long, device="cpu")  # models look at its values, and drop it if all are 1
    mask[0, -1] = 0
    return {**batch, "attention_mask": mask}


def _accepted(target: str, make_it: Callable[[], Any]) -> Any:
    """What transformers makes; whatever it says against it, in one line."""
    try:
        return make_it()
    except Exception as error:  # it has errors of its own, and of what checks its fields
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise OptionError(f"{target} is refused by transformers: {said or type(error).__name__}") from error

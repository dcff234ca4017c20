"""Ways of copying a model, of which none needs Fastensor."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


def pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"fastensor" not in data, "it is loaded where Fastensor is not installed"
    again: nn.Module = pickle.loads(data)
    return again


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"fastensor" not in file.getvalue()
    again: nn.Module = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return again


def averaged(model: nn.Module) -> nn.Module:
    inside: nn.Module = AveragedModel(model).module
    return inside


WAYS = (copy.deepcopy, pickled, saved_whole, averaged)

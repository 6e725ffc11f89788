"""Tensor subclasses of fastai, torchvision and MONAI on the device, by the same on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def described(value: Any) -> Any:
    """The class, what is kept there, the values."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    name = type(value).__name__.replace("XLATensor", "Tensor")
    kept = {k: str(v) for k, v in vars(value).items() if k in ("format", "canvas_size", "_meta")}
    return name, kept, value.detach().cpu().as_subclass(torch.Tensor)


def close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    else:
        assert found[:2] == wanted[:2]
        torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-5)


def test_tv_tensors() -> None:
    tv_tensors = pytest.importorskip("torchvision.tv_tensors", reason="no torchvision")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    torch.manual_seed(0)
    pixels = torch.rand(3, 16, 16)

    def run(device: str, compiled: bool = False) -> Any:
        image = tv_tensors.Image(pixels.to(device))
        corners = torch.tensor([[1, 2, 5, 6.0], [3, 3, 8, 9]], device=device)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(16, 16))
        mask = tv_tensors.Mask(image > 0.5)
        both = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((8, 8)), v2.Pad(1)])
        flip = v2.functional.horizontal_flip
        step = lambda i, b: [flip(i), flip(b), i + 1, b.clone(), i]
        with tv_tensors.set_return_type("TVTensor"):
            kept = [image + 1, boxes * 2]
        return described(
            [
                *(image, image + 1, image.clone(), image.cpu(), boxes[0], boxes.clone(), kept),
                *(tv_tensors.wrap(corners * 2, like=boxes), both({"i": image, "b": boxes})),
                *(v2.ConvertBoundingBoxFormat("CXCYWH")(boxes), v2.CenterCrop(8)(mask)),
                (xd.compile(step) if compiled else step)(image, boxes),
            ]
        )

    wanted = run("cpu")
    close(run("xla"), wanted)
    close(run("xla", compiled=True), wanted)


def test_monai() -> None:
    if "fastai" in sys.modules:
        pytest.skip("fastai's as_subclass lets CPU tensors of all libraries share what they keep")
    data = pytest.importorskip("monai.data", reason="no MONAI")
    transforms = pytest.importorskip("monai.transforms")
    collate = pytest.importorskip("monai.data.utils")
    torch.manual_seed(0)
    voxels = torch.rand(1, 8, 8, 8)

    def run(device: str) -> Any:
        x = voxels.to(device)
        m = data.MetaTensor(x, affine=torch.eye(4) * 2, meta={"name": "a"})
        batch = collate.list_data_collate([m, m])
        return described(
            [
                *(
                    m,
                    m + 1,
                    x + m,
                    m[0],
                    m.clone(),
                    m.to("cpu"),
                    m.as_tensor(),
                    torch.stack([m, m]),
                ),
                *(batch, collate.decollate_batch(batch), transforms.Flip(0)(m)),
                *(transforms.Resize((4, 4, 4))(m), transforms.ScaleIntensity()(m)),
            ]
        )

    close(run("xla"), run("cpu"))


def test_fastai() -> None:
    """A whole `Learner`: its batches are of subclasses that copy all that is kept on a tensor."""
    fastai = pytest.importorskip("fastai.vision.all", reason="no fastai")
    torch.manual_seed(0)
    pixels, kinds = torch.randn(24, 3, 8, 8), torch.randint(0, 3, (24,))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def run(device: str) -> Any:
        items = [
            (fastai.TensorImage(x), fastai.TensorCategory(y))
            for x, y in zip(pixels, kinds, strict=True)
        ]
        loaders = fastai.DataLoaders.from_dsets(
            *(items[:16], items[16:]), bs=8, device=torch.device(device), shuffle=False
        )
        model.to("cpu").load_state_dict(start)
        learner = fastai.Learner(loaders, model, loss_func=fastai.CrossEntropyLossFlat())
        with learner.no_bar(), learner.no_logging():
            learner.fit(2, 1e-2)
            losses = torch.stack(list(learner.recorder.losses))
            predicted, _ = learner.get_preds()
        image, _ = loaders.one_batch()
        assert type(image) == fastai.TensorImage and image.device.type == device  # noqa: E721
        return described([losses, predicted, image + 1])

    close(run("xla"), run("cpu"))

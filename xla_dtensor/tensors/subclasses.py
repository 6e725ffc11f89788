"""xla tensors of a user's own subclass of ``torch.Tensor``: ``x.as_subclass(Image)``.

torch's ``as_subclass`` makes an alias, and lets a Python object of the wanted class be made for it.
An alias of ours has its object already, an `XLATensor`, as its memory is Python's. So that object
gets a class made from both: ``Image`` first, whose methods and ``__torch_function__`` are meant,
then ours, which computes. It is called like ``Image``, and where torch tells ``Image`` which
classes are concerned, it hears of itself.

Such classes keep what they know of an image in the tensor's ``__dict__``, and copy all that is
there from one tensor to the next (fastai, MONAI). So what we keep on the tensor isn't there.
"""

from __future__ import annotations

import functools
from types import MemberDescriptorType, new_class
from typing import Any

import torch

from xla_dtensor.base import interrupts, thread_state
from xla_dtensor.base.ours import OurTensor, is_ours
from xla_dtensor.base.torch_private import (
    disable_function_of_subclasses,
    disabled_torch_function,
    rebuild_from_type,
    unseen,
)
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES, dict_of_tensor, users_of
from xla_dtensor.tensors.saving import reduce_tensor

_SHOWN = "_xla_dtensor_shown"
_OF_TORCH = (torch.Tensor, torch.nn.Parameter)


class _Attributes(dict[str, Any]):
    """The ``__dict__`` of a shown tensor: what the user keeps there. Copies are plain.

    Attributes:
        own: what we keep on the tensor.
    """

    __slots__ = ("own",)
    own: dict[str, Any]

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class _Shown(type(torch.Tensor)):  # type: ignore[misc]
    """Of a class that shows itself as the user's: equal to that, as which it is looked up in dicts
    of classes (``torch.utils.data.default_collate``)."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or shown_class(cls) is shown_class(other)

    def __hash__(cls) -> int:
        return hash(shown_class(cls))


class _Own:
    """A name of ours on a shown tensor."""

    def __init__(self, name: str, cls: type) -> None:
        self._name, self._cls = name, cls

    def __get__(self, tensor: Any, cls: Any = None) -> Any:
        if tensor is not None:
            own = dict_of_tensor.__get__(tensor).own
            if self._name in own:
                return own[self._name]
        return getattr(self._cls, self._name)

    def __set__(self, tensor: Any, value: Any) -> None:
        dict_of_tensor.__get__(tensor).own[self._name] = value

    def __delete__(self, tensor: Any) -> None:
        del dict_of_tensor.__get__(tensor).own[self._name]


def _set_attributes(tensor: Any, given: dict[str, Any]) -> None:
    if not thread_state.swaps_tensors():
        own, given = dict_of_tensor.__get__(tensor).own, _Attributes(users_of(given))
        given.own = own
    dict_of_tensor.__set__(tensor, given)


def shown_class(cls: Any) -> Any:
    """What a class of ours, ``type(x)``, means for a tensor elsewhere: the user's class that it is
    made of, or ``torch.Tensor``. Others are what they are."""
    if not isinstance(cls, type) or not issubclass(cls, OurTensor):
        return cls
    return vars(cls).get(_SHOWN, torch.Tensor)


def is_shown(tensor: Any) -> bool:
    """Whether ``tensor`` is one of ours that shows itself as one of a user's class."""
    return _SHOWN in vars(type(tensor))


def show_as(tensor: Any, cls: Any) -> Any:
    """Make ``tensor``, which nobody else has yet, one of ``cls``.

    Args:
        tensor: an `XLATensor` or an `XLAShardedTensor`.
        cls: a subclass of ``torch.Tensor``.

    Raises:
        TypeError: as in torch: ``cls`` is no such class.
        UnsupportedOpError: ``cls`` computes operations itself, or has slots.
    """
    is_class = isinstance(cls, type) and issubclass(cls, torch.Tensor)
    if not is_class:
        raise TypeError(f"cls must be a type that derives from torch.Tensor (got {cls!r})")
    cls = vars(cls).get(_SHOWN, cls)
    own: Any = type(tensor)
    if isinstance(tensor, cls):
        return tensor
    if cls is torch.nn.Parameter or cls is torch.nn.Buffer:
        setattr(tensor, "_is_param" if cls is torch.nn.Parameter else "_is_buffer", True)
        return tensor
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedOpError(
            f"an xla tensor can't be a {cls.__name__}, which has a __torch_dispatch__ of its own: "
            "the xla tensor's is needed. Keep the xla tensor in an attribute of one that "
            "torch.Tensor._make_wrapper_subclass(cls, shape, dtype=..., device='xla:0') makes"
        )
    try:
        tensor.__class__ = _made_of(cls, own)
    except TypeError as error:
        raise UnsupportedOpError(
            f"an xla tensor can't be a {cls.__name__} ({error}): the class may have no __slots__, "
            "and no other base written in C"
        ) from error
    attributes = dict_of_tensor.__get__(tensor)
    if attributes.__class__ is not _Attributes:
        users = _Attributes(users_of(attributes))
        users.own = {k: v for k, v in attributes.items() if k in OWN_ATTRIBUTES}
        dict_of_tensor.__set__(tensor, users)
    return tensor


def as_subclass(tensor: Any, cls: Any) -> Any:
    """``tensor.as_subclass(cls)``: torch's, of one of ours; differentiable, and the same memory."""
    with unseen():
        alias = torch.ops.aten.alias.default(tensor)
    return show_as(alias, cls)


def make_subclass(cls: Any, tensor: Any, requires_grad: bool = False) -> Any:
    """``torch.Tensor._make_subclass(cls, tensor, requires_grad)`` likewise: without history."""
    with unseen():
        alias = tensor.detach().requires_grad_(requires_grad)
    return show_as(alias, cls)


def of_class_of(moved: Any, parameter: Any) -> None:
    """Make ``moved``, which torch has made a plain parameter of ``parameter``'s value elsewhere,
    one of its class. From the CPU to CUDA torch puts the value into the parameter that is there; so
    code that goes by the class, as geoopt's optimizers do, finds it.

    Raises:
        UnsupportedOpError: as `show_as`.
    """
    cls = shown_class(type(parameter))
    if isinstance(moved, cls) or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return
    if is_ours(moved):
        show_as(moved, cls)
    else:
        moved.__class__ = cls


# As often as there are pairs of classes; that a class lives on is no matter, as few are made.
@functools.cache
def _made_of(shown: Any, own: Any) -> Any:
    @classmethod  # type: ignore[misc]
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return shown.__torch_function__(func, tuple(map(shown_class, types)), args, kwargs)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Who makes another view of a tensor's memory means one of ours; a user, one of the class.
        if args and args[0].__class__ is Storage:
            return own(*args, **kwargs)
        made = shown.__new__(shown, *args, **kwargs)
        if isinstance(made, shown) and not isinstance(made, cls):
            made.__init__(*args, **kwargs)  # Python does so for a result of ``cls`` alone
        return made

    @classmethod  # type: ignore[misc]
    @interrupts.atomic
    def torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In a backward pass nobody has switched ``__torch_function__`` off.
        with disable_function_of_subclasses():
            return own.__torch_dispatch__(func, types, args, kwargs)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        with disable_function_of_subclasses():
            return show_as(own.__deepcopy__(self, memo), shown)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        if issubclass(shown, torch.nn.Parameter):  # which torch, too, saves as a parameter
            return own.__reduce_ex__(self, protocol)
        with disable_function_of_subclasses():
            function, args = reduce_tensor(self, frozenset(vars(self)))
        own_state = shown.__getstate__ is not object.__getstate__
        state = self.__getstate__() if own_state else dict(vars(self))
        return rebuild_from_type, (function, shown, args, state)

    members = {
        "__module__": shown.__module__,
        "__qualname__": shown.__qualname__,
        "__doc__": shown.__doc__,
        "__new__": new,
        "__torch_function__": torch_function,
        "__torch_dispatch__": torch_dispatch,
        "__dict__": property(dict_of_tensor.__get__, _set_attributes),
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce_ex,
        _SHOWN: shown,
    }
    for name in OWN_ATTRIBUTES:
        if not isinstance(getattr(own, name, None), MemberDescriptorType):  # DTensor's slots
            members[name] = _Own(name, own)
    for name in ("__deepcopy__", "__reduce_ex__"):  # the class may have its own
        if all(getattr(shown, name) is not getattr(c, name) for c in _OF_TORCH):
            del members[name]
    if shown.__torch_function__ is disabled_torch_function:
        members["__torch_function__"] = disabled_torch_function
    # The most derived of the two classes' metaclasses, or one made of both.
    kinds = [k for k in (type(shown), type(own)) if not issubclass(_Shown, k)]
    metaclass = type("_Shown", (_Shown, *kinds), {}) if kinds else _Shown
    return new_class(
        shown.__name__, (shown, own), {"metaclass": metaclass}, lambda body: body.update(members)
    )

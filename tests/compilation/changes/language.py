"""Reads that Python makes without the code naming them: `match`, copies, texts, changed classes.

Each maker gives a function and a change, and the function computes something else after it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import inspect
import json
import operator
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.compilation.changes._table import Program, rows
from tests.compilation.changes._world import World

Case = tuple[Callable[..., Any], Callable[[], Any]]


def mk(a: float) -> Any:
    return types.SimpleNamespace(zz=a)


class Box:
    k = 2.0

    def __init__(self, v: float = 2.0) -> None:
        self.v = v


def match_positional(world: World) -> Case:
    class P:
        __match_args__ = ("a", "b")

        def __init__(s):
            s.a, s.b = 2.0, 3.0

    p = P()

    def f(x):
        match p:
            case P(a, b):
                return x * a + b

    return f, lambda: setattr(p, "a", 5.0)


class _Given:
    """What gives a class its names, as the properties of classes that nanobind makes do."""

    def __get__(self, instance: Any, cls: type) -> tuple[str, ...]:
        return ("a",)


def match_by_a_property(world: World) -> Case:
    class P:
        __match_args__ = _Given()

        def __init__(s):
            s.a = 2.0

    p = P()

    def f(x):
        match p:
            case P(a):
                return x * a

    return f, lambda: setattr(p, "a", 5.0)


def match_args_changed(world: World) -> Case:
    class P:
        __match_args__ = ("a", "b")

        def __init__(s):
            s.a, s.b = 2.0, 3.0

    p = P()

    def f(x):
        match p:
            case P(a, b):
                return x * a + b

    return f, lambda: setattr(P, "__match_args__", ("b", "a"))


def copy_dunder(world: World) -> Case:
    class P:
        factor = 2.0

        def __copy__(s):
            q = P()
            q.zz = s.factor * 2
            return q

    p = P()
    return (lambda x: x * copy.copy(p).zz), lambda: setattr(p, "factor", 5.0)


def deepcopy_dunder(world: World) -> Case:
    class P:
        factor = 2.0

        def __deepcopy__(s, memo):
            q = P()
            q.zz = s.factor * 2
            return q

    p = P()
    return (lambda x: x * copy.deepcopy(p).zz), lambda: setattr(p, "factor", 5.0)


def reduce_dunder(world: World) -> Case:
    class P:
        factor = 2.0

        def __reduce__(s):
            return (mk, (s.factor,))

    p = P()
    return (lambda x: x * copy.copy(p).zz), lambda: setattr(p, "factor", 5.0)


def getstate_dunder(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __getstate__(s):
            return {"zz": s.factor}

    p = P()
    return (lambda x: x * copy.copy(p).zz), lambda: setattr(p, "factor", 5.0)


def str_dunder(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __str__(s):
            return str(s.factor)

    p = P()
    return (lambda x: x * float(str(p))), lambda: setattr(p, "factor", 5.0)


def format_dunder(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __format__(s, spec):
            return str(s.factor)

    p = P()
    return (lambda x: x * float(f"{p:x}")), lambda: setattr(p, "factor", 5.0)


def repr_dunder(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __repr__(s):
            return str(s.factor)

    p = P()
    return (lambda x: x * float(f"{p}")), lambda: setattr(p, "factor", 5.0)


def repr_percent(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __str__(s):
            return str(s.factor)

    p = P()
    return (lambda x: x * float("%s" % p)), lambda: setattr(p, "factor", 5.0)  # noqa: UP031


def format_method(world: World) -> Case:
    class P:
        def __init__(s):
            s.factor = 2.0

        def __str__(s):
            return str(s.factor)

    p = P()
    return (lambda x: x * float(f"{p}")), lambda: setattr(p, "factor", 5.0)


def hash_dunder(world: World) -> Case:
    class P:
        def __init__(s):
            s.h = 2

        def __hash__(s):
            return s.h

    p = P()
    return (lambda x: x * hash(p)), lambda: setattr(p, "h", 5)


def metaclass_attr_of_object(world: World) -> Case:
    class M(type):
        z = 2.0

    class P(metaclass=M):
        pass

    p = P()
    return (lambda x: x * type(p).z), lambda: setattr(M, "z", 3.0)


def metaclass_prop(world: World) -> Case:
    class M(type):
        @property
        def z(c):
            return c._z

    class P(metaclass=M):
        _z = 2.0

    p = P()
    return (lambda x: x * p.__class__.z), lambda: setattr(P, "_z", 3.0)


def bases_changed(world: World) -> Case:
    class A:
        z = 2.0

    class B:
        z = 3.0

    class C(A):
        pass

    c = C()
    return (lambda x: x * c.z), lambda: setattr(C, "__bases__", (B,))


def bases_read(world: World) -> Case:
    class A:
        z = 2.0

    class B:
        z = 3.0

    class C(A):
        pass

    return (lambda x: x * C.__bases__[0].z), lambda: setattr(C, "__bases__", (B,))


def dir_read(world: World) -> Case:
    b = Box()
    return (lambda x: x * len(dir(b))), lambda: setattr(b, "more", 1)


def getmembers_made_up(world: World) -> Case:
    b = Box()
    n = ["v"]
    return (lambda x: x * dict(inspect.getmembers(b))[n[0]]), lambda: setattr(b, "v", 5.0)


def getattr_static(world: World) -> Case:
    b = Box()
    n = ["v"]
    return (lambda x: x * inspect.getattr_static(b, n[0])), lambda: setattr(b, "v", 5.0)


def doc_of_function(world: World) -> Case:
    def g():
        "ab"

    return (lambda x: x * len(g.__doc__)), lambda: setattr(g, "__doc__", "abcd")


def name_of_function(world: World) -> Case:
    def g():
        "ab"

    return (lambda x: x * len(g.__name__)), lambda: setattr(g, "__name__", "abcd")


def annotations_of_function(world: World) -> Case:
    def g(a: int):
        "ab"

    return (lambda x: x * len(g.__annotations__)), lambda: g.__annotations__.update(b=1)


def doc_of_class(world: World) -> Case:
    class C:
        "ab"

    return (lambda x: x * len(C.__doc__)), lambda: setattr(C, "__doc__", "abcd")


def name_of_class(world: World) -> Case:
    class C:
        "ab"

    return (lambda x: x * len(C.__name__)), lambda: setattr(C, "__name__", "abcd")


def name_of_class_of_object(world: World) -> Case:
    class C:
        "ab"

    c = C()
    return (lambda x: x * len(type(c).__name__)), lambda: setattr(C, "__name__", "abcd")


def module_of_class(world: World) -> Case:
    class C:
        "ab"

    return (lambda x: x * len(C.__module__)), lambda: setattr(C, "__module__", "abcd")


def methodcaller_made_up(world: World) -> Case:
    n = ["get"]

    class P:
        q = 2.0

        def get(s):
            return s.q

    p = P()
    return (lambda x: x * operator.methodcaller(n[0])(p)), lambda: setattr(p, "q", 3.0)


def lru_clear_later(world: World) -> Case:
    cell = [2.0]

    @functools.cache
    def g(a):
        return cell[0]

    def fn(x):
        return x * g(1)

    g(1)
    cell[0] = 3.0
    return fn, lambda: g.cache_clear()


def cpu_requires_grad(world: World) -> Case:
    c = torch.ones(4)
    return (lambda x: x * (3 if c.requires_grad else 2)), lambda: c.requires_grad_()


def version_of_captured(world: World) -> Case:
    c = world.tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), None)
    return (lambda x: x * (c._version + 1)), lambda: c.add_(1)


def signature_override(world: World) -> Case:
    def g(a=2.0):
        pass

    g.__signature__ = inspect.Signature(
        [inspect.Parameter("a", inspect.Parameter.KEYWORD_ONLY, default=2.0)]
    )
    return (lambda x: x * inspect.signature(g).parameters["a"].default), lambda: setattr(
        g,
        "__signature__",
        inspect.Signature([inspect.Parameter("a", inspect.Parameter.KEYWORD_ONLY, default=3.0)]),
    )


def get_type_hints(world: World) -> Case:
    def g(a: int):
        pass

    return (lambda x: x * len(typing.get_type_hints(g))), lambda: g.__annotations__.update(b=int)


def json_default(world: World) -> Case:
    class E(json.JSONEncoder):
        n = 2.0

        def default(s, o):
            return s.n

    return (lambda x: x * float(json.dumps(object(), cls=E))), lambda: setattr(E, "n", 3.0)


def defaultdict_factory(world: World) -> Case:
    d = collections.defaultdict(lambda: 2.0)
    return (lambda x: x * d["z"] if False else x * d.default_factory()), lambda: setattr(
        d, "default_factory", lambda: 3.0
    )


def deque_maxlen(world: World) -> Case:
    b = [collections.deque([1.0, 2.0], maxlen=2)]
    return (lambda x: x * b[0].maxlen), lambda: b.__setitem__(
        0, collections.deque([1.0, 2.0], maxlen=3)
    )


def state_dict_keys(world: World) -> Case:
    m = torch.nn.Linear(2, 2).to(world.device)
    return (lambda x: x * len(m.state_dict())), lambda: m.register_buffer("q", torch.zeros(1))


def cpu_resized(world: World) -> Case:
    t = torch.zeros(3)
    return (lambda x: x * t.numel()), lambda: t.resize_(5)


def json_dumps(world: World) -> Case:
    b = Box()
    return (lambda x: x * json.loads(json.dumps(b.__dict__))["v"]), lambda: setattr(b, "v", 3.0)


def instancecheck(world: World) -> Case:
    class M(type):
        yes = True

        def __instancecheck__(c, o):
            return c.yes

    class C(metaclass=M):
        pass

    return (lambda x: x * (2 if isinstance(5, C) else 3)), lambda: setattr(M, "yes", False)


def mro_entry_super(world: World) -> Case:
    class A:
        def f(s):
            return 2.0

    class B(A):
        def f(s):
            return super().f() * 2

    b = B()
    return (lambda x: x * b.f()), lambda: setattr(A, "f", lambda s: 5.0)


def class_changed(world: World) -> Case:
    class A:
        def f(s):
            return 2.0

    class B:
        def f(s):
            return 3.0

    b = A()
    return (lambda x: x * b.f()), lambda: setattr(b, "__class__", B)


def code_replaced(world: World) -> Case:
    def g():
        return 2.0

    def h():
        return 3.0

    return (lambda x: x * g()), lambda: setattr(g, "__code__", h.__code__)


def kwdefaults_inplace(world: World) -> Case:
    def g(*, k=2.0):
        return k

    return (lambda x: x * g()), lambda: g.__kwdefaults__.update(k=3.0)


def singledispatch_reg(world: World) -> Case:
    @functools.singledispatch
    def g(a):
        return 2.0

    return (lambda x: x * g(1)), lambda: g.register(int, lambda a: 3.0)


def exec_text(world: World) -> Case:
    t = ["r = 2.0"]

    def f(x):
        d = {}
        exec(t[0], d)
        return x * d["r"]

    return f, lambda: t.__setitem__(0, "r = 3.0")


def contextmanager(world: World) -> Case:
    b = Box()

    @contextlib.contextmanager
    def cm():
        yield b.v

    def f(x):
        with cm() as v:
            return x * v

    return f, lambda: setattr(b, "v", 3.0)


def class_in_step(world: World) -> Case:
    class B:
        reg = 2.0

        def __init_subclass__(cls):
            cls.v = B.reg

    def f(x):
        class D(B):
            pass

        return x * D.v

    return f, lambda: setattr(B, "reg", 3.0)


def hasattr_dunder(world: World) -> Case:
    class C:
        pass

    c = C()
    return (lambda x: x * (2 if hasattr(c, "__len__") else 3)), lambda: setattr(
        C, "__len__", lambda s: 1
    )


def add_bool_later(world: World) -> Case:
    class C:
        pass

    c = C()
    return (lambda x: x * (2 if c else 3)), lambda: setattr(C, "__bool__", lambda s: False)


def add_eq_later(world: World) -> Case:
    class C:
        pass

    c = C()
    return (lambda x: x * (2 if c == 1 else 3)), lambda: setattr(C, "__eq__", lambda s, o: True)


def instance_shadow_method(world: World) -> Case:
    class C:
        def f(s):
            return 2.0

    c = C()
    return (lambda x: x * c.f()), lambda: setattr(c, "f", lambda: 3.0)


def data_descriptor_added(world: World) -> Case:
    class A:
        pass

    a = A()
    a.k = 2.0
    return (lambda x: x * a.k), lambda: setattr(A, "k", property(lambda s: 3.0))


def getattr_added(world: World) -> Case:
    class A:
        pass

    a = A()
    return (lambda x: x * getattr(a, "k", 2.0)), lambda: setattr(A, "__getattr__", lambda s, n: 3.0)


def getattribute_added(world: World) -> Case:
    class A:
        pass

    a = A()
    a.k = 2.0
    return (lambda x: x * a.k), lambda: setattr(A, "__getattribute__", lambda s, n: 3.0)


def obj_eq_by_attr(world: World) -> Case:
    class C:
        def __init__(s, k):
            s.k = k

        def __hash__(s):
            return 1

        def __eq__(s, o):
            return s.k == o.k

    a = C(1)
    d = {a: 2.0}
    return (lambda x: x * d.get(C(1), 7.0)), lambda: setattr(a, "k", 2)


def weakkey(world: World) -> Case:
    b = Box()
    d = weakref.WeakKeyDictionary()
    d[b] = 2.0
    return (lambda x: x * d[b]), lambda: d.__setitem__(b, 3.0)


def weakset(world: World) -> Case:
    b = Box()
    s = weakref.WeakSet()
    s.add(b)
    o = Box(3.0)
    return (lambda x: x * sum(i.v for i in s)), lambda: s.add(o)


def partial_keywords(world: World) -> Case:
    p = functools.partial(lambda x, k: x * k, k=2.0)
    return (lambda x: p(x)), lambda: p.keywords.update(k=3.0)


def userstring(world: World) -> Case:
    kept = collections.UserString("2")
    return (lambda x: x * float(str(kept))), lambda: setattr(kept, "data", "3")


def enum_value(world: World) -> Case:
    class E(enum.Enum):
        A = 2.0

    return (lambda x: x * E.A.value), lambda: setattr(E.A, "_value_", 3.0)


MAKERS: tuple[Callable[[World], Case], ...] = (
    match_positional,
    match_by_a_property,
    match_args_changed,
    copy_dunder,
    deepcopy_dunder,
    reduce_dunder,
    getstate_dunder,
    str_dunder,
    format_dunder,
    repr_dunder,
    repr_percent,
    format_method,
    hash_dunder,
    metaclass_attr_of_object,
    metaclass_prop,
    bases_changed,
    bases_read,
    dir_read,
    getmembers_made_up,
    getattr_static,
    doc_of_function,
    name_of_function,
    annotations_of_function,
    doc_of_class,
    name_of_class,
    name_of_class_of_object,
    module_of_class,
    methodcaller_made_up,
    lru_clear_later,
    cpu_requires_grad,
    version_of_captured,
    signature_override,
    get_type_hints,
    json_default,
    defaultdict_factory,
    deque_maxlen,
    state_dict_keys,
    cpu_resized,
    json_dumps,
    instancecheck,
    mro_entry_super,
    class_changed,
    code_replaced,
    kwdefaults_inplace,
    singledispatch_reg,
    exec_text,
    contextmanager,
    class_in_step,
    hasattr_dunder,
    add_bool_later,
    add_eq_later,
    instance_shadow_method,
    data_descriptor_added,
    getattr_added,
    getattribute_added,
    obj_eq_by_attr,
    weakkey,
    weakset,
    partial_keywords,
    userstring,
    enum_value,
)


@rows({maker.__name__: maker for maker in MAKERS})
def read(world: World, make: Callable[[World], Case]) -> Program:
    function, change = make(world)
    step = world.compile(function)
    yield step(world.batch(0, (4,)))
    yield step(world.batch(0, (4,)))
    world.change(change)
    yield step(world.batch(0, (4,)))
    yield step(world.batch(1, (4,)))
    world.at_most(3, step)

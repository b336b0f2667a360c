"""Random regular expressions and JSON schemas, and checks that share nothing with llguidance."""

import dataclasses

from hypothesis import strategies as st

LETTERS = "abc"


@dataclasses.dataclass(frozen=True)
class Regex:
    """A regular expression: nothing, the empty text, a letter, a sequence, one of two, or any number of one."""

    kind: str
    parts: tuple = ()
    letter: str = ""

    @property
    def pattern(self):
        """In the syntax of `re`."""
        inner = [part.pattern for part in self.parts]
        match self.kind:
            case "letter":
                return self.letter
            case "empty":
                return "(?:)"
            case "sequence":
                return "".join(inner)
            case "either":
                return f"(?:{'|'.join(inner)})"
            case "many":
                return f"(?:{inner[0]})*"
        raise AssertionError(self.kind)

    @property
    def is_nullable(self):
        """Whether it matches the empty text."""
        match self.kind:
            case "empty" | "many":
                return True
            case "sequence":
                return all(part.is_nullable for part in self.parts)
            case "either":
                return any(part.is_nullable for part in self.parts)
        return False

    def after(self, letter):
        """What remains to be matched after a letter (Brzozowski, 1964)."""
        match self.kind:
            case "letter":
                return EMPTY if self.letter == letter else NOTHING
            case "sequence":
                first, rest = self.parts[0], sequence(*self.parts[1:])
                found = sequence(first.after(letter), rest)
                return either(found, rest.after(letter)) if first.is_nullable else found
            case "either":
                return either(*(part.after(letter) for part in self.parts))
            case "many":
                return sequence(self.parts[0].after(letter), self)
        return NOTHING

    def after_text(self, text):
        found = self
        for letter in text:
            found = found.after(letter)
        return found


NOTHING, EMPTY = Regex("nothing"), Regex("empty")


def sequence(*parts):
    """In this order; nothing if a part is nothing."""
    if NOTHING in parts:
        return NOTHING
    kept = [part for part in parts if part != EMPTY]
    return EMPTY if not kept else kept[0] if len(kept) == 1 else Regex("sequence", tuple(kept))


def either(*parts):
    """One of the parts that are not nothing."""
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return NOTHING if not kept else kept[0] if len(kept) == 1 else Regex("either", kept)


letters = st.sampled_from(LETTERS).map(lambda letter: Regex("letter", letter=letter))
regexes = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: sequence(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
        inner.map(lambda part: either(part, EMPTY)),
        inner.map(lambda part: Regex("many", (part,))),
    ),
    max_leaves=8,
)


def _objects(inner):
    properties = st.dictionaries(st.sampled_from(["x", "y", "long name"]), inner, max_size=3)
    return properties.flatmap(
        lambda each: st.sets(st.sampled_from(sorted(each)) if each else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": each,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


_bounds = st.tuples(st.integers(-20, 20), st.integers(0, 30)).map(
    lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
)
_strings = st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most})
_enums = st.lists(st.sampled_from(["red", "é\n", 3, None, True, ""]), min_size=1, max_size=3).map(
    lambda values: {"enum": values}
)
schemas = st.recursive(
    st.one_of(_bounds, _strings, _enums, st.just({"type": "boolean"}), st.just({"type": "null"})),
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 3}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=4,
)


def accepts(schema, value):
    """Whether a schema of this file accepts a value."""
    if "anyOf" in schema:
        return any(accepts(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(accepts(schema["items"], each) for each in value)
            )
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(properties)
        and all(accepts(properties[name], each) for name, each in value.items())
    )

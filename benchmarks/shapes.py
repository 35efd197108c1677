"""The tokens, heads and layers that the figures are for."""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Shape:
    """One sequence of a model: `heads` and `layers` are the model's own."""

    model: str
    picture: str
    tokens: int
    heads: int
    dim: int
    layers: int

    @property
    def name(self):
        return f"{self.model} {self.picture}"


# Tokens of the picture and of the text, or of the video. Of an UNEVEN one ranks cannot have equal shares.
FLUX = Shape("FLUX", "1024x1024", 64 * 64 + 512, 24, 128, 57)
FLUX_UNEVEN = replace(FLUX, picture="1008x1008", tokens=63 * 63 + 512)
WAN = Shape("Wan", "832x480, 81 frames", 21 * 30 * 52, 40, 128, 40)
WAN_UNEVEN = replace(WAN, picture="848x480, 81 frames", tokens=21 * 30 * 53)


def cut(tokens, ranks):
    """Rows of each rank, as torch.tensor_split cuts them."""
    return tuple(tokens // ranks + (rank < tokens % ranks) for rank in range(ranks))


@dataclass(frozen=True)
class Scaled(Shape):
    """A shape with the heads and layers that are run, and the model's own."""

    model_heads: int
    model_layers: int


def scaled(shape, heads, layers, dim):
    own = {"model_heads": shape.heads, "model_layers": shape.layers}
    return Scaled(**asdict(shape) | own | {"heads": heads, "layers": layers, "dim": dim})

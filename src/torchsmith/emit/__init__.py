"""Text only: kernels and host programs as C. Importing the room registers the statements that stand in files of their own."""

from . import blocks as blocks
from . import contraction as contraction
from . import grouped as grouped
from . import paired as paired

"""What a method stores about the classes it has seen: means, covariances in one of several forms, counts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import gaussians, prototypes
from efcil.core.classifiers import ClassStatistics
from efcil.core.covariance import IN_SHORT, average, is_factored, join, low_rank, ranks, shorten, spell_out, whole
from efcil.core.transport import AffineMap
from efcil.errors import SettingsError
from efcil.methods.kept import Keeping, rows_of, weighted

#: One covariance of all images about the means of their classes, with its degrees of freedom.
POOLED = "pooled"
#: Forms in which classes may share a covariance: one per task, only the last task's, or one for all classes, in which
#: either every class (common) or every image (pooled) has the same weight.
SHARED = ("task", "last-task", "common", POOLED)
MOMENTS = "moments"
#: All forms of covariances: one per class in full, shared, compressed, or as second moments about the origin.
FORMS = ("class", *SHARED, *IN_SHORT, MOMENTS)

#: Bytes that covariances of classes, kept whole, may take unless settings say otherwise.
LIMIT = 2 * 10**9
#: Share of the variance that is kept of covariances which would take more than the limit. Heads re-balanced with them
#: were as accurate as with whole ones (docs/scale.md).
SHARE_BEYOND = 0.9
_NUMBER = torch.float32.itemsize

_AVERAGE = "An average over a class's images in feature space, which many different images share. "
_SPAN = (
    "With fewer images than features it spans exactly the features it was measured on, which can separate training "
    "images from others, most of all if they were not augmented (see membership in `efcil audit`). It holds no pixels."
)
_BUFFERS = ("means", "covariances", "compact", "moments", "covariance_of", "counts", "freedom")
Stored = TypeVar("Stored")


class ClassMemory(Keeping):
    """A row for every class seen, in the order of the classes: its mean, and what else the constructor asks for.

    `why` says what the method needs the memory for. `covariances` is one of FORMS, or None for means only; low-rank
    ones keep `share` of a class's variance. With `table`, which covariance a class uses is saved in every form, not
    only if classes share them. With `counts`, the number of images of every class is saved too. A pooled covariance
    depends neither on the order of the classes nor on their grouping into tasks; `freedom` is what it is based on.

    If one covariance per class would take more than `limit` bytes, only factors of low rank are kept: `covariances`
    then has fewer columns than rows (see core/covariance.py). That changes nothing in the names of what is saved.
    """

    means: Tensor
    covariances: Tensor
    compact: Tensor
    moments: Tensor
    covariance_of: Tensor
    counts: Tensor
    freedom: Tensor

    def __init__(
        self,
        size: int,
        *,
        why: str,
        covariances: str | None = None,
        share: float = 0.99,
        table: bool = False,
        counts: bool = False,
        limit: float = math.inf,
    ) -> None:
        super().__init__()
        self.form, self.share, self.limit = covariances, SHARE_BEYOND if covariances == "class" else share, limit
        self.has_table, self.has_counts = table or covariances in SHARED, counts
        self.keep(
            "means",
            torch.zeros(0, size),
            why=why,
            title="class means",
            recovery=_AVERAGE + "Inverting the network on a mean gives at best a picture of the average; the mean of a "
            "class with a single image is that image's feature vector.",
        )
        self._keep_spread(size)
        if self.has_table:
            self.keep(
                "covariance_of",
                torch.zeros(0, dtype=torch.int64),
                why="which covariance a class uses",
                title="covariance table",
                recovery="Nothing about images.",
            )
        if counts:
            self.keep(
                "counts",
                torch.zeros(0, dtype=torch.int64),
                why="how many images each class had",
                title="image counts",
                recovery="How many images each class had.",
            )

    def _keep_spread(self, size: int) -> None:
        """Create the buffers for covariances in the form that they are kept in."""
        title, why = "class covariances", "spread of a class's features, to draw features that resemble it"
        if self.form is None:
            return
        if self.form in SHARED:
            title = "shared covariances"
        if self.form == MOMENTS:
            title, why = "class second moments", "sums of products of a class's features, to solve for a classifier"
            name, empty = "moments", torch.zeros(0, size, size)
        elif self.form in IN_SHORT:
            name, empty = "compact", torch.zeros(0, size, 0) if self.form == "low-rank" else torch.zeros(0, size)
            # The compressed form is saved; the full covariances are computed from it.
            self.register_buffer("covariances", torch.zeros(0, size, size), persistent=False)
        else:
            # An empty dimension fits any size: in a limited memory, columns may become fewer.
            name, empty = "covariances", torch.zeros(0, size, 0 if self.form == "class" else size)
        own = 0 if self.form in SHARED else 1
        self.keep(name, empty, why=why, title=title, recovery=_AVERAGE + _SPAN, per_class=own)
        if self.form == POOLED:
            self.keep(
                "freedom",
                torch.zeros(1, dtype=torch.int64),
                why="how many images, less one per class, the covariance is based on",
                title="degrees of freedom",
                recovery="How many images there were.",
            )

    # -- contents ----------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> tuple[str, ...]:
        """What classifiers may be built on: means, and covariances if there are any."""
        return ("means",) if self.form is None else ("means", "covariances")

    @property
    def blends(self) -> bool:
        """Whether more images of a known class can be blended in: full covariances, one for each class or pooled."""
        if self.form == POOLED:
            return True
        in_full = self.form is not None and self.form != MOMENTS and self.form not in IN_SHORT
        return in_full and len(self.covariances) == len(self.means)

    @property
    def factored(self) -> bool:
        """Whether only factors of covariances are there, because they would take too much memory."""
        return self.form is not None and self.form != MOMENTS and len(self.means) > 0 and is_factored(self.covariances)

    def too_large(self, classes: int) -> bool:
        """Return whether one whole covariance for each of so many classes would take more than the limit."""
        return classes * self.means.shape[1] ** 2 * _NUMBER > self.limit

    def outlook(self, classes: int) -> str | None:
        """Return what to expect with so many classes, in a sentence, if that is much; None if it is not."""
        size = self.means.shape[1]
        taken = classes * size**2 * _NUMBER
        if self.form not in ("class", MOMENTS) or taken <= min(self.limit, LIMIT):
            return None
        begin = f"One covariance for each of {classes:,} classes with {size:,} features takes {taken / 1e9:.3g} GB"
        if not self.too_large(classes):
            return f"{begin}, in memory and in every checkpoint."
        first = int(self.limit // (size**2 * _NUMBER)) + 1
        return (
            f"{begin}, more than covariance_limit={self.limit / 1e9:g}. From class {first:,} on, only the leading "
            f"directions of each are kept, with {self.share:.0%} of its variance (covariance=low-rank). To keep all: "
            f"--set covariance_limit={math.ceil(taken / 1e9)}"
        )

    def statistics(self) -> ClassStatistics:
        """Return means and covariances for classifiers."""
        if self.form is None:
            return ClassStatistics(self.means)
        if self.form == MOMENTS:
            return ClassStatistics(self.means, self.moments - self.means[:, :, None] * self.means[:, None])
        size = self.means.shape[1]
        covariances = self.covariances if len(self.means) else self.means.new_zeros(0, size, size)
        return ClassStatistics(self.means, covariances, self.covariance_of if self.has_table else None)

    def spread(self) -> Tensor:
        """Return what is kept of covariances, in the form that it is kept in; not if there are none."""
        return self.moments if self.form == MOMENTS else self.compact if self.form in IN_SHORT else self.covariances

    def components(self) -> list[int] | None:
        """Return how many components the low-rank covariance of every class has, None in another form."""
        if self.form != "low-rank" and not self.factored:
            return None
        counts: list[int] = ranks(self.spread()).tolist()
        return counts

    def sampler(self, jitter: float) -> Sampler:
        """Return a sampler of features of the classes; `jitter` is added to every variance."""
        covariances, factor_of = self.statistics().spread()
        shared = int(torch.bincount(factor_of).max()) if len(factor_of) else 1
        return Sampler(self.means, prototypes.cholesky_factors(covariances, jitter), factor_of, shared)

    # -- how it changes ----------------------------------------------------------------------------------------

    def add(self, features: Tensor, labels: Tensor, classes: range) -> tuple[Tensor, Tensor]:
        """Add new classes, measured on their features (N, n) and labels (N).

        Returns their means and covariances (or second moments, if those are kept), even if only some are kept; of a
        pooled covariance, that of these classes.
        """
        within = gaussians.within_classes(features, labels, classes) if self.form == POOLED else None
        measure = prototypes.second_moments if self.form == MOMENTS else prototypes.class_statistics
        means, spread = measure(features, labels, classes) if within is None else (within.means, within.covariance)
        earlier = len(self.means)
        self.means = torch.cat([self.means, means.to(self.means)])
        if self.has_counts:
            new = torch.bincount(labels - classes.start, minlength=len(classes))
            self.counts = torch.cat([self.counts, new.to(self.counts)])
        if self.form == MOMENTS:
            self.moments = torch.cat([self.moments, spread.to(self.moments)])
        elif within is not None:
            self._pool(within, range(earlier, len(self.means)), [0] * len(classes))
        elif self.form is not None:
            self._add_covariances(spread.to(self.covariances), earlier)
        return means, spread

    def _pool(self, measured: gaussians.Within, known: Sequence[int], images: Sequence[int]) -> None:
        """Pool what was measured on more images of `known` classes, or of new ones, with what was there before.

        `images` is how many each of the classes had before: zero for new ones.
        """
        old = torch.tensor([float(each) for each in images], dtype=torch.float64, device=measured.means.device)
        share = (measured.counts / (old + measured.counts))[:, None]
        shift = measured.means - self.means[known].double()
        scatter = measured.scatter + (old[:, None] * share * shift).T @ shift
        # A new class gives one degree of freedom to its mean.
        more = int(measured.counts.sum()) - int((old == 0).sum())
        if int(self.freedom):
            scatter += int(self.freedom) * self.covariances[0].double()
        self.freedom = self.freedom + more
        self.means[known] += (share * shift).to(self.means)
        self.covariances = (scatter / max(int(self.freedom), 1)).to(self.means)[None]
        self.covariance_of = torch.zeros(len(self.means), dtype=torch.int64, device=self.means.device)

    def _add_covariances(self, new: Tensor, earlier: int) -> None:
        """Add the covariances (q, n, n) of new classes to `earlier` ones, in the form that they are kept in."""
        first, every = len(self.covariances), torch.zeros(earlier + len(new), dtype=torch.int64, device=new.device)
        places = first + torch.arange(len(new), device=new.device)
        if self.form == "common":
            both = torch.cat([self.covariances.expand(earlier, -1, -1), new])
            self.covariances = average(both)
        elif self.form == "last-task":
            self.covariances = average(new)
        elif self.form == "task":
            self.covariances = torch.cat([self.covariances, average(new)])
            places = torch.full_like(places, first)
        elif self.form in IN_SHORT:
            self.compact = join(self.compact, shorten(new, str(self.form), self.share))
            self.restored()
        elif self.form == "class" and self.too_large(earlier + len(new)):
            self.covariances = join(self._in_factors(self.covariances), self._in_factors(new))
        else:
            self.covariances = join(self.covariances, new)
        if self.has_table:
            one = self.form in ("common", "last-task")
            self.covariance_of = every if one else torch.cat([self.covariance_of, places])

    def _in_factors(self, covariances: Tensor) -> Tensor:
        """Return factors (C, n, r) of covariances (C, n, n); what is factors already is returned as it is."""
        if is_factored(covariances):
            return covariances
        # With as many columns as rows, they would look like covariances.
        return low_rank(covariances, self.share)[:, :, : covariances.shape[1] - 1]

    def move(self, means: Tensor) -> None:
        """Set the means of the classes (C, n); their covariances stay."""
        self.means = means

    def carry(self, by: AffineMap, residual: bool = False) -> None:
        """Move means and covariances (not moments) by a map; with `residual`, add what it leaves unexplained."""
        self.means = by.points(self.means)
        if self.form is None:
            return
        if self.factored:
            self._set_factors([self._carried(each, by, residual) for each in self.covariances])
            return
        self.covariances = by.covariances(self.covariances, residual)
        if self.form in IN_SHORT:
            # A map does not raise the rank, so the result need not be truncated again.
            self.compact = shorten(self.covariances, str(self.form), self.share if residual else 1.0)
            self.restored()

    def carry_each(self, maps: Iterable[AffineMap], residual: bool = False) -> None:
        """Move every class by a map of its own, likewise; the maps are asked for one after the other.

        A covariance that classes share becomes the mean of what it would be for each of them.
        """
        means = self.means.clone()
        covariances, of = self.statistics().spread()
        moved = torch.zeros_like(covariances)
        factors = list(covariances) if self.factored else []
        users = torch.bincount(of, minlength=len(covariances)).tolist()
        for row, (by, place) in enumerate(zip(maps, of.tolist(), strict=True)):
            means[row] = by.points(self.means[row : row + 1])[0]
            if factors:
                factors[place] = self._carried(covariances[place], by, residual)
            else:
                moved[place] += by.covariances(covariances[place : place + 1], residual)[0] / users[place]
        self.means = means
        if factors:
            self._set_factors(factors)
            return
        self.covariances = moved
        if self.form in IN_SHORT:
            self.compact = shorten(moved, str(self.form), self.share if residual else 1.0)
            self.restored()

    def _carried(self, factor: Tensor, by: AffineMap, residual: bool) -> Tensor:
        """Move one factor (n, r) by a map, likewise."""
        moved = by.matrix @ factor.double()
        if residual:
            moved = self._in_factors((moved @ moved.T + by.residual)[None])[0]
        return moved.to(factor.dtype)

    def _set_factors(self, factors: Sequence[Tensor]) -> None:
        """Set the factors (n, r) of all classes, each with columns of its own."""
        width = max(each.shape[1] for each in factors)
        self.covariances = torch.stack([functional.pad(each, (0, width - each.shape[1])) for each in factors])
        if self.form in IN_SHORT:
            self.compact = self.covariances

    def replace(self, number: int, mean: Tensor, spread: Tensor) -> None:
        """Replace mean (n) and covariance or second moment (n, n) of one class."""
        kept = self.moments if self.form == MOMENTS else self.covariances
        self.means[number] = mean.to(self.means)
        if self.factored:
            self._set_covariance(number, spread, len(self.means))
            return
        kept[number] = spread.to(kept)

    def blend(self, features: Tensor, labels: Tensor, images: Sequence[int]) -> None:
        """Blend in features (N, n) of known classes, as if measured with the `images` that each class had before.

        Only if `blends` is true. A memory that counts images itself goes by its own numbers.
        """
        known, before = sorted(set(labels.tolist())), self._counted(images)
        fresh = torch.bincount(labels, minlength=len(self.means))
        if self.form == POOLED:
            self._pool(gaussians.within_classes(features, labels, known), known, [before[each] for each in known])
        else:
            self._blend_each(known, *prototypes.class_statistics(features, labels, known), before, fresh)
        if self.has_counts:
            self.counts += fresh.to(self.counts)

    def _counted(self, images: Sequence[int]) -> Sequence[int]:
        """Return how many images each class was measured on: an image that was given weight counts more than once.

        Where no counts are kept, `images` is the best that is known.
        """
        counts: Sequence[int] = self.counts.tolist() if self.has_counts else images
        return counts

    def _blend_each(
        self, known: Sequence[int], means: Tensor, covariances: Tensor, images: Sequence[int], fresh: Tensor
    ) -> None:
        """Blend new means and covariances of `known` classes into theirs, one class after the other."""
        for row, number in enumerate(known):
            before = (self.means[number], whole(self.covariances[number]), images[number])
            self.replace(number, *gaussians.blend(before, (means[row], covariances[row], int(fresh[number]))))

    # -- classes that go -----------------------------------------------------------------------------------------

    def keep_rows(self, kept: Sequence[int], seen: int) -> None:
        """Keep only the classes `kept`, and the covariances that one of them uses."""
        self.means = rows_of(self.means, kept)
        if self.has_counts:
            self.counts = rows_of(self.counts, kept)
        used = list(kept)
        if self.has_table:
            of = rows_of(self.covariance_of, kept).tolist()
            used = list(dict.fromkeys(of))  # in the order of the classes: one covariance each stays one each
            self.covariance_of = torch.tensor([used.index(each) for each in of], device=self.means.device)
        if self.form == MOMENTS:
            self.moments = rows_of(self.moments, used)
        elif self.form in IN_SHORT:
            self.compact = rows_of(self.compact, used)
            if self.form == "low-rank":  # columns that only a class which is gone had
                self.compact = self.compact[:, :, : int(ranks(self.compact).max())].clone()
            self.restored()
        elif self.form is not None:
            self.covariances = rows_of(self.covariances, used)

    def merge(self, classes: Sequence[int], images: Sequence[int]) -> None:
        """Let the first of several classes stand for all of them: as if measured on all of their images together.

        The others stay, to be removed with `keep_rows`. `images` are the numbers of images of all classes, for a memory
        that does not count them itself. A covariance that classes share is not theirs alone: the class gets one of its
        own where the form allows it, else its share of the common one. A pooled one becomes what it would be if they
        had always been one class.
        """
        first, seen, images = classes[0], len(self.means), self._counted(images)
        if self.form is None or self.form == MOMENTS:
            weights = torch.tensor([float(images[each]) for each in classes], dtype=torch.float64)
            weights /= weights.sum()
            self.means[first] = weighted(self.means[list(classes)], weights)
            if self.form == MOMENTS:
                self.moments[first] = weighted(self.moments[list(classes)], weights)
        elif self.form == POOLED:
            self._pool_merged(classes, images)
        else:
            covariances, of = self.statistics().spread()
            joined = (self.means[first], whole(covariances[of[first]]), images[first])
            for each in classes[1:]:
                both = gaussians.blend(joined, (self.means[each], whole(covariances[of[each]]), images[each]))
                joined = (*both, joined[2] + images[each])
            self.means[first] = joined[0]
            self._set_covariance(first, joined[1], seen - len(classes) + 1)
        if self.has_counts:
            self.counts[first] = self.counts[list(classes)].sum()

    def _pool_merged(self, classes: Sequence[int], images: Sequence[int]) -> None:
        """Add to the pooled scatter that of the means of merged classes; fewer classes have fewer means to estimate."""
        weights = torch.tensor([float(images[each]) for each in classes], dtype=torch.float64, device=self.means.device)
        means = self.means[list(classes)].double()
        mean = (weights[:, None] * means).sum(dim=0) / weights.sum()
        scatter = int(self.freedom) * self.covariances[0].double()
        scatter += (weights[:, None] * (means - mean)).T @ (means - mean)
        self.means[classes[0]] = mean.to(self.means)
        self.freedom = self.freedom + len(classes) - 1
        self.covariances = (scatter / max(int(self.freedom), 1)).to(self.covariances)[None]

    def _set_covariance(self, number: int, covariance: Tensor, left: int) -> None:
        """Set the covariance of one class, in the form they are kept in; `left` classes will be left."""
        if self.factored:
            new = self._in_factors(covariance[None])[0].to(self.covariances.dtype)
            self._set_factors([*self.covariances[:number], new, *self.covariances[number + 1 :]])
        elif self.form == "task":
            self.covariance_of[number] = len(self.covariances)
            self.covariances = torch.cat([self.covariances, covariance[None]])
        elif self.form in SHARED:
            self.covariances = torch.lerp(self.covariances, covariance[None], 1 / left)
        elif self.form in IN_SHORT:
            new = shorten(covariance[None], str(self.form), self.share)
            self.compact = join(join(self.compact[:number], new), self.compact[number + 1 :])
            self.restored()
        else:
            self.covariances[number] = covariance

    def unused(self) -> int:
        """Return how many covariances are stored that no class uses."""
        if self.form is None or self.form == MOMENTS:
            return 0
        stored, of = self.statistics().spread()
        return len(set(range(len(stored))) - set(of.tolist()))

    def restored(self) -> None:
        """Compute what is not saved from what is saved. Called after a state was loaded."""
        if self.form == "class" and self.covariances.shape[2] > self.covariances.shape[1]:
            raise SettingsError(
                f"Its covariances have the shape {tuple(self.covariances.shape)}: more columns than the "
                f"{self.covariances.shape[1]} features. They are not what was saved."
            )
        if self.form == "low-rank" and self.too_large(len(self.compact)) and is_factored(self.compact):
            self.covariances = self.compact
        elif self.form in IN_SHORT:
            self.covariances = spell_out(self.compact)


@dataclass(frozen=True)
class Sampler:
    """Draws features of classes from their Gaussians: means (C, n), factors (G, n, r), and which one a class uses (C).

    At most `shared` classes use one factor.
    """

    means: Tensor
    factors: Tensor
    factor_of: Tensor
    shared: int

    def features(self, labels: Tensor, generator: torch.Generator, most: int) -> Tensor:
        """Draw a feature for each label (K); no label may occur more than `most` times. Never waits for a device."""
        noise = torch.randn(len(labels), self.factors.shape[2], generator=generator, device=labels.device)
        groups = self.factor_of[labels]
        return self.means[labels] + prototypes.coloured_noise(self.factors, groups, noise, most * self.shared)

    def classes(self, counts: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw counts[c] features of every class c: features (K, n) and labels (K), class after class."""
        return gaussians.sample_classes(self.means, self.factors, self.factor_of, counts, generator)


def renamed(tensors: Mapping[str, Stored], present: Collection[str]) -> dict[str, Stored]:
    """Return a saved state with the present names of tensors: `memory.means` was once `means`.

    `present` are the names of the method that will load it; a user's own method may still have a buffer `means`.
    """
    found = {}
    for name, tensor in tensors.items():
        now = re.sub(rf"^(base\.)?({'|'.join(_BUFFERS)})$", r"\1memory.\2", name)
        found[now if name not in present and now in present else name] = tensor
    return found

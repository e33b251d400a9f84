"""The checks that a backbone must pass: any callable that returns a module from images to features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efcil.testing.compare import assert_equal, clone, require, require_close
from efcil.testing.verdicts import Check


@dataclass(frozen=True)
class Candidate:
    """What makes a backbone, and the size of the square images it is checked with."""

    make: Callable[[], nn.Module]
    pixels: int = 32

    def images(self, count: int = 6) -> Tensor:
        """Return images of noise, as normalised ones are: (count, 3, pixels, pixels)."""
        return torch.randn(count, 3, self.pixels, self.pixels, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def features(self, backbone: nn.Module, images: Tensor) -> Tensor:
        """Return features in eval mode."""
        features: Tensor = backbone.eval()(images)
        return features


def check_gives_features(candidate: Candidate) -> None:
    """Images (batch, 3, size, size) become finite float32 features (batch, n), and `feature_size` says n."""
    backbone = candidate.make()
    require(isinstance(backbone, nn.Module), f"It returns a {type(backbone).__name__}, not a torch.nn.Module.")
    images = candidate.images()
    found = candidate.features(backbone, images)
    require(isinstance(found, Tensor), f"It gives a {type(found).__name__}, not a tensor.")
    right = found.dim() == 2 and len(found) == len(images)
    require(right, f"{len(images)} images become the shape {tuple(found.shape)}, not ({len(images)}, n).")
    require(found.dtype == torch.float32, f"Features are {found.dtype}, not torch.float32.")
    require(bool(torch.isfinite(found).all()), "A feature is not finite.")
    size = getattr(backbone, "feature_size", None)
    require(size == found.shape[1], f"It gives {found.shape[1]} features, but its `feature_size` is {size}.")


def check_features_tell_images_apart(candidate: Candidate) -> None:
    """Different images have different features."""
    found = candidate.features(candidate.make(), candidate.images())
    require(len(found.unique(dim=0)) == len(found), "Different images have the same features.")


def check_eval_is_deterministic(candidate: Candidate) -> None:
    """In eval mode features repeat to the bit, and those of an image do not depend on the others of its batch."""
    backbone, images = candidate.make(), candidate.images()
    first, state = candidate.features(backbone, images), clone(backbone.state_dict())
    require(torch.equal(candidate.features(backbone, images), first), "Features differ the second time.")
    assert_equal(clone(backbone.state_dict()), state)
    require_close(candidate.features(backbone, images[1:4]), first[1:4], "A feature in another batch", 1e-4, 1e-4)


def check_training_is_deterministic(candidate: Candidate) -> None:
    """In training mode features repeat to the bit: no dropout, with which a resumed run ends differently."""
    backbone, images = candidate.make().train(), candidate.images()
    state = clone(backbone.state_dict())
    first = backbone(images)
    backbone.load_state_dict(state)
    require(torch.equal(backbone(images), first), "It draws random numbers, which are others after an interruption.")


def check_every_parameter_gets_a_gradient(candidate: Candidate) -> None:
    """The backward pass gives every parameter that trains a finite gradient, and one that is not zero."""
    backbone, images = candidate.make().train(), candidate.images()
    features = backbone(images)
    # Random weights: after BatchNorm the plain sum of features may be constant.
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    (features * weights).sum().backward()
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            require(parameter.grad is not None, f"{name} gets no gradient.")
            assert parameter.grad is not None
            require(bool(torch.isfinite(parameter.grad).all()), f"The gradient of {name} is not finite.")
            require(bool((parameter.grad != 0).any()), f"The gradient of {name} is zero.")


def check_trains_on_a_single_image(candidate: Candidate) -> None:
    """A batch of one image, which an epoch may end with, has a forward and a backward pass in training mode."""
    features = candidate.make().train()(candidate.images(1))
    features.square().sum().backward()
    require(bool(torch.isfinite(features).all()), "A feature of a single image is not finite.")


def check_state_is_complete(candidate: Candidate) -> None:
    """A state that is loaded into a new backbone, and a copy of the module, give the same features to the bit."""
    backbone, images = candidate.make().train(), candidate.images()
    backbone(images)  # which moves the statistics of BatchNorm
    expected, state = candidate.features(backbone, images), clone(backbone.state_dict())
    again = candidate.make()
    again.load_state_dict(state)
    assert_equal(clone(again.state_dict()), state)
    same = torch.equal(candidate.features(again, images), expected)
    require(same, "Features differ after the state was loaded into a new backbone: something is not part of it.")
    require(torch.equal(candidate.features(copy.deepcopy(backbone), images), expected), "Features of a copy differ.")


#: Every check, in the order in which they are run.
CHECKS: tuple[Check[Candidate], ...] = (
    Check(check_gives_features, basis=True),
    Check(check_features_tell_images_apart),
    Check(check_eval_is_deterministic),
    Check(check_training_is_deterministic),
    Check(check_every_parameter_gets_a_gradient),
    Check(check_trains_on_a_single_image),
    Check(check_state_is_complete),
)

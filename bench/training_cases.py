"""What is trained by bench/steps.py and the training suite: models with their optimizers, steps and batches.

In: a name. Out: a Case. CASES: twenty small models of different kinds, each with the step that its kind is known for; sizes are small, so
that a step takes milliseconds: what differs is what a step does. TIMED: three whose speed is measured. `case_of` also knows the ten models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import MODELS, inputs_of, make_model

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """`step(model, *optimizers, *batch)`; `make(model)` gives the optimizers."""

    model: nn.Module
    make: Callable[[nn.Module], list[Any]]
    step: Step
    batch: Callable[[], tuple[Any, ...]]


CASES: dict[str, Callable[[], Case]] = {}


def train_model(model: Any, optimizer: Any, data: Tensor, target: Tensor) -> Tensor:
    """The XLA document's step."""
    loss_fn = torch.nn.CrossEntropyLoss()
    pred = model(data)
    pred = pred if isinstance(pred, Tensor) else pred[1]
    loss = loss_fn(pred, target)
    loss.backward()
    optimizer.step()
    return pred


def timed_step(model: Any, optimizer: Any, data: Tensor, target: Tensor) -> Tensor:
    """Forward, loss, backward, update, zero_grad; of BERT every parameter takes part."""
    out = model(data)
    if isinstance(out, Tensor):
        loss = F.cross_entropy(out, target)
    else:
        loss = F.cross_entropy(out.pooler_output, target) + out.last_hidden_state.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def case_of(name: str, step: Step = train_model, batch: int = 2, lr: float = 1e-3) -> Case:
    """A case by its name; step, batch size and learning rate are those of the ten models. Seeded."""
    torch.manual_seed(0)
    if name not in MODELS:
        return TIMED[name]() if name in TIMED else CASES[name]()

    def make(m: nn.Module) -> list[Any]:
        return [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, weight_decay=1e-2)]

    def inputs() -> tuple[Any, ...]:
        seed = int(torch.randint(0, 1000, ()))
        return *inputs_of(name, batch, seed), torch.randint(0, 700, (batch,))

    return Case(make_model(name).train(), make, step, inputs)


def case(fn: Callable[[], Case]) -> Callable[[], Case]:
    CASES[fn.__name__] = fn
    return fn


def adam(m: nn.Module) -> list[Any]:
    return [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-3)]


def sgd(m: nn.Module) -> list[Any]:
    return [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)]


def supervised(loss: Callable[[Any, Any], Tensor]) -> Step:
    """zero_grad, forward, loss, backward, step."""

    def step(model: Any, optimizer: Any, *batch: Any) -> Tensor:
        *inputs, target = batch
        optimizer.zero_grad()
        value = loss(model(*inputs), target)
        value.backward()
        optimizer.step()
        return value

    return step


def by_class(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def tokens(*shape: int, n: int = 20) -> Tensor:
    return torch.randint(0, n, shape)


# ---------------------------------------------------------------- sequences


class Translator(nn.Module):
    """torch's own encoder and decoder, with masks of padding and of the future."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.core = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padded = source == 0
        masks = {"tgt_mask": future, "src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        return self.head(self.core(self.embed(source), self.embed(target), **masks))


@case
def encoder_decoder() -> Case:
    def batch() -> tuple[Any, ...]:
        source = tokens(3, 7)
        source[:, 0] = 1
        return source, tokens(3, 6), tokens(3, 6)

    return Case(Translator(), adam, supervised(by_class), batch)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A causal transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block(16, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case
def causal_tied() -> Case:
    def make(m: nn.Module) -> list[Any]:
        matrices = [p for p in m.parameters() if p.dim() > 1]
        others = [p for p in m.parameters() if p.dim() <= 1]
        return [torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3)]

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Case(Language(), make, step, lambda: (tokens(2, 10), tokens(2, 10)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(20, 8), kind(8, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.core(self.embed(x))
        return self.head(out[:, -1])


@case
def lstm() -> Case:
    return Case(Recurrent(nn.LSTM, num_layers=2, dropout=0.2), adam, supervised(F.cross_entropy), lambda: (tokens(4, 9), tokens(4, n=3)))


@case
def gru_bidirectional() -> Case:
    return Case(Recurrent(nn.GRU, bidirectional=True), sgd, supervised(F.cross_entropy), lambda: (tokens(4, 9), tokens(4, n=3)))


class Attentive(nn.Module):
    """Sequence to sequence, cell by cell, with additive attention and the teacher's words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(16, 8)
        self.query, self.key, self.energy = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1, bias=False)  # softmax cancels a bias
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        state, keys, out = state[0], self.key(memory), []
        for i in range(target.size(1)):
            weights = self.energy(torch.tanh(keys + self.query(state).unsqueeze(1))).softmax(1)
            context = (weights * memory).sum(1)
            state = self.decoder(torch.cat([self.embed(target[:, i]), context], -1), state)
            out.append(self.head(state))
        return torch.stack(out, 1)


@case
def seq2seq_attention() -> Case:
    return Case(Attentive(), adam, supervised(by_class), lambda: (tokens(3, 6), tokens(3, 5), tokens(3, 5)))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 9, stride=4), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 12, 5, stride=2, groups=2), nn.GroupNorm(3, 12),
            nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Conv1d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).permute(2, 0, 1).log_softmax(-1)


@case
def audio_ctc() -> Case:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        lengths = torch.full((x.shape[0],), out.shape[0], dtype=torch.long)
        loss = F.ctc_loss(out, y, lengths, torch.full((x.shape[0],), y.shape[1], dtype=torch.long))
        loss.backward()
        optimizer.step()
        return loss

    return Case(Speech(), adam, step, lambda: (torch.randn(2, 1, 200), tokens(2, 4, n=5) + 1))


@case
def audio_nll() -> Case:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(out.mean(0), target)

    return Case(Speech(), sgd, supervised(loss), lambda: (torch.randn(2, 1, 200), tokens(2, n=6)))


# ---------------------------------------------------------------- images and volumes


class Down(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, channels: int = 1, extra: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.middle = Down(channels + extra, 4), Down(4, 8), Down(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.third, self.fourth = Down(16, 4), Down(8, 4)
        self.head = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        d = self.third(torch.cat([self.up(c), b], 1))
        e = self.fourth(torch.cat([F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False), a], 1))
        return self.head(e)


@case
def unet_dice() -> Case:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        p = out.sigmoid()
        dice = 1 - (2 * (p * target).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(out, target) + dice.mean()

    return Case(UNet(), adam, supervised(loss), lambda: (torch.randn(2, 1, 16, 16), (torch.rand(2, 1, 16, 16) > 0.5).float()))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = UNet(1, 1), nn.Linear(8, 1)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(4, dtype=x.dtype) / 4)
        at = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        return self.net(torch.cat([x, at[:, :, None, None].expand(-1, 1, *x.shape[2:])], 1))


@case
def diffusion() -> Case:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        t = torch.randint(0, 50, (x.shape[0],))
        noise = torch.randn(x.shape).to(x.dtype)
        a = model.alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(Denoiser(), adam, step, lambda: (torch.randn(3, 1, 16, 16),))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(
            nn.Linear(6, 32), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.d = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(64, 1))


@case
def gan() -> Case:
    def make(m: Any) -> list[Any]:
        return [torch.optim.Adam(p.parameters(), lr=2e-4, betas=(0.5, 0.999)) for p in (m.g, m.d)]

    def step(model: Any, of_g: Any, of_d: Any, real: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        one, zero = torch.ones(real.shape[0], 1, dtype=real.dtype), torch.zeros(real.shape[0], 1, dtype=real.dtype)
        fake = model.g(z)
        of_d.zero_grad()
        d_loss = F.binary_cross_entropy_with_logits(model.d(real), one) + F.binary_cross_entropy_with_logits(model.d(fake.detach()), zero)
        d_loss.backward()
        of_d.step()
        of_g.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(model.d(fake), one)
        g_loss.backward()
        of_g.step()
        return d_loss.detach(), g_loss.detach()

    return Case(Gan(), make, step, lambda: (torch.randn(4, 1, 8, 8), torch.randn(4, 6)))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mu, self.var = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.outer = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.softplus(self.inner(x))
        mu, var = self.mu(h), self.var(h)
        z = mu + torch.randn(mu.shape).to(mu.dtype) * torch.exp(0.5 * var)
        return torch.sigmoid(self.outer(z)), mu, var


@case
def vae() -> Case:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out, mu, var = model(x)
        loss = F.binary_cross_entropy(out, x, reduction="sum") - 0.5 * torch.sum(1 + var - mu.pow(2) - var.exp())
        loss.backward()
        optimizer.step()
        return loss

    return Case(Vae(), adam, step, lambda: (torch.rand(5, 20),))


class Residual(nn.Module):
    """Depthwise convolutions, channel attention, norms without statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depth, self.point = nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Conv2d(8, 8, 1)
        self.norm, self.inst = nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.inst(self.stem(x)))
        y = self.norm(self.point(self.depth(x)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(F.mish(x + y).mean((-2, -1)))


@case
def depthwise_group_norm() -> Case:
    def make(m: nn.Module) -> list[Any]:
        return [torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9)]

    return Case(Residual(), make, supervised(F.cross_entropy), lambda: (torch.randn(3, 3, 12, 12), tokens(3, n=5)))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(F.max_pool3d(F.leaky_relu(self.norm(self.a(x))), 2)).amax((2, 3, 4)))


@case
def conv3d() -> Case:
    return Case(Volume(), sgd, supervised(F.cross_entropy), lambda: (torch.randn(2, 1, 6, 6, 6), tokens(2, n=3)))


# ---------------------------------------------------------------- tables, graphs, experts


class GraphNet(nn.Module):
    """Messages along edges: attention over a node's edges by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score, self.head = nn.Linear(6, 8), nn.Linear(16, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            h = self.inner(x) if x.shape[1] == 6 else h  # noqa: F821
            source, target = edges
            e = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)), 0.2).squeeze(-1)
            top = torch.zeros(x.shape[0], dtype=x.dtype).scatter_reduce(0, target, e, "amax", include_self=False)
            w = (e - top[target]).exp()
            total = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, w)
            messages = h[source] * (w / (total[target] + 1e-9)).unsqueeze(-1)
            h = torch.relu(torch.zeros_like(h).scatter_add_(0, target.unsqueeze(-1).expand_as(messages), messages) + h)
            x = h
        return self.head(h)


@case
def graph_scatter() -> Case:
    return Case(GraphNet(), adam, supervised(F.cross_entropy), lambda: (torch.randn(9, 6), torch.randint(0, 9, (2, 30)), tokens(9, n=3)))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums, self.tops = nn.EmbeddingBag(30, 6, mode="sum"), nn.EmbeddingBag(30, 6, mode="mean")
        self.wide, self.deep = nn.Linear(12, 1), nn.Sequential(nn.Linear(12, 8), nn.PReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        h = torch.cat([self.sums(x, offsets), self.tops(x, offsets)], -1)
        return (self.wide(h) + self.deep(h)).squeeze(-1)


@case
def embedding_bag() -> Case:
    def make(m: nn.Module) -> list[Any]:
        return [torch.optim.Adagrad(m.parameters(), lr=0.05)]

    def batch() -> tuple[Any, ...]:
        return tokens(12, n=30), torch.tensor([0, 3, 5, 5]), torch.rand(4).round()

    return Case(Bags(), make, supervised(F.binary_cross_entropy_with_logits), batch)


class Experts(nn.Module):
    """Two of four experts for each token, and a loss that spreads the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        w, chosen = p.topk(2, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, k = torch.where(chosen == i)
            out = out.index_add(0, row, expert(x[row]) * w[row, k, None])
        spread = (F.one_hot(chosen[:, 0], 4).to(p.dtype).mean(0) * p.mean(0)).sum() * 4
        return self.head(out + x), spread


@case
def mixture_of_experts() -> Case:
    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out[0], target) + 0.01 * out[1]

    return Case(Experts(), adam, supervised(loss), lambda: (torch.randn(12, 8), tokens(12, n=3)))


# ---------------------------------------------------------------- pairs, copies, queues


class Encoder(nn.Sequential):
    def __init__(self, out: int = 6) -> None:
        super().__init__(nn.Linear(10, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, out))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = Encoder(), Encoder(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        return a @ b.t() * self.scale.exp()


@case
def contrastive() -> Case:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(x, y)
        labels = torch.arange(x.shape[0])
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, math.log(100))
        return loss

    return Case(Clip(), adam, step, lambda: (torch.randn(5, 10), torch.randn(5, 10)))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(x) for x in inputs)


@case
def siamese_triplet() -> Case:
    def step(model: Any, optimizer: Any, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        optimizer.zero_grad()
        a, p, n = model(a, p, n)
        loss = F.triplet_margin_loss(a, p, n, margin=0.5) + F.cosine_embedding_loss(a, n, -torch.ones(a.shape[0], dtype=a.dtype), 0.1)
        loss.backward()
        optimizer.step()
        return loss

    return Case(Siamese(), sgd, step, lambda: tuple(torch.randn(4, 10) for _ in range(3)))


class Moco(nn.Module):
    """A queue of keys from a slowly moving copy."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 12), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def move(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.99 + q.data * 0.01

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        at = int(self.at)
        self.queue[:, at : at + keys.shape[0]] = keys.t()
        self.at[0] = (at + keys.shape[0]) % 12

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            self.move()
            k = F.normalize(self.key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        self.push(k)
        return F.cross_entropy(logits, torch.zeros(a.shape[0], dtype=torch.long))


@case
def contrastive_queue() -> Case:
    def step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        loss = model(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Case(Moco(), lambda m: [torch.optim.SGD(m.query.parameters(), 0.03, momentum=0.9)], step,
                lambda: (torch.randn(4, 10), torch.randn(4, 10)))  # fmt: skip


class Agent(nn.Module):
    """An actor, a critic, and copies of both that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2), nn.Tanh()), nn.Linear(7, 1)
        self.actor2, self.critic2 = (copy.deepcopy(m).requires_grad_(False) for m in (self.actor, self.critic))


@case
def actor_critic_copies() -> Case:
    def make(m: Any) -> list[Any]:
        return [torch.optim.Adam(m.actor.parameters(), 1e-3), torch.optim.AdamW(m.critic.parameters(), 1e-3)]

    def step(m: Any, of_actor: Any, of_critic: Any, s: Tensor, a: Tensor, r: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            want = r + 0.99 * m.critic2(torch.cat([s2, m.actor2(s2)], 1))
        value = F.mse_loss(m.critic(torch.cat([s, a], 1)), want)
        of_critic.zero_grad()
        value.backward()
        of_critic.step()
        policy = -m.critic(torch.cat([s, m.actor(s)], 1)).mean()
        of_actor.zero_grad()
        policy.backward()
        of_actor.step()
        with torch.no_grad():
            for one, two in ((m.actor, m.actor2), (m.critic, m.critic2)):
                for p, q in zip(one.parameters(), two.parameters(), strict=True):
                    q.mul_(0.995).add_(p, alpha=0.005)
        return value.detach(), policy.detach()

    return Case(Agent(), make, step, lambda: (torch.randn(6, 5), torch.rand(6, 2), torch.randn(6, 1), torch.randn(6, 5)))


@case
def accumulation_frozen() -> Case:
    """A frozen trunk, three micro-batches, and gradients by value clipped."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = Encoder(8).requires_grad_(False), nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x))

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=x.dtype)
        for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.multi_margin_loss(model(part), target) / 3
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return total

    return Case(Tuned(), adam, step, lambda: (torch.randn(9, 10), tokens(9, n=3)))


# ---------------------------------------------------------------- timed: batch 32


def adamw(m: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(m.parameters(), lr=1e-5)]


def mlp3() -> Case:
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return Case(nn.Sequential(*layers), adamw, timed_step, lambda: (torch.randn(32, 64), tokens(32, n=10)))


def transformer() -> Case:
    """Two blocks of width 128 over 32 characters."""
    blocks = [Block(128, 4, 0.0) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 128), *blocks, nn.LayerNorm(128), nn.Linear(128, 64), nn.Flatten(0, 1))
    return Case(model, adamw, timed_step, lambda: (tokens(32, 32, n=64), tokens(32 * 32, n=64)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(500, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def lstm_classifier() -> Case:
    return Case(Classifier(), adamw, timed_step, lambda: (tokens(32, 50, n=500), tokens(32, n=4)))


TIMED = {"mlp3": mlp3, "transformer": transformer, "lstm_classifier": lstm_classifier}

"""Sizes that only the data tell: rows that a mask chose, of which there may be none, one, or as many as another operand has.

A program is an expression of the rows y [k, 3] and their numbers i [k]. Each is compiled once and called with several k; what is 1 by
chance broadcasts, is squeezed and counts as eager has it. Strides of empty results and what a program asks about strides are not compared.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # programs name it
from torch import nn

import torchsmith

QUICK = """
y.squeeze(); y.squeeze(0); i.squeeze(-1); y[:,None].squeeze((0,1)); torch.cat([torch.ones(2,3,4),i.float()]); y.max(); y.std(0);
y.topk(2,0); y.softmax(0); bn(y); i+torch.arange(3); torch.where(i>1,i,torch.arange(1)); y.expand(2,3); torch.ones(2,3).expand_as(y);
torch.broadcast_tensors(i,torch.arange(3)); y.view(2,-1); i.reshape(1); y.unbind(0); y[1];
(y.__setitem__(slice(None,2),torch.ones(2,3)),y)[1]; i.nonzero().squeeze(); torch.zeros(8,3).index_put((i,),torch.ones(2,3));
y[:,None,:]@torch.ones(3,3,4); torch.einsum('bi,bj->bij',y,O3); torch.arange(64).view(8,8)[i,I3];
torch.take_along_dim(O3,i[:,None]%3,1); F.cosine_similarity(y,O3);
F.scaled_dot_product_attention(y[:,None,None],O3[:,None,None],O3[:,None,None]);
torch.distributions.Normal(O3,y.abs()+1).log_prob(O3); torch.broadcast_tensors(y,O3,torch.ones(1,3))
"""
MORE = """
y.clone().squeeze_(); i.sum().item(); torch.cat([y,torch.ones(2,3)]); torch.cat([i,torch.arange(3)]);
torch.cat([torch.ones(2,3),y.flatten()[:0]]); torch.stack([y,y*2],1); y.mean(); y.mean(0); y.max(0); y.amax(0); y.amax(1);
y.argmax(); y.argmax(0); y.var(); y.median(); y.median(0); y.sort(0); i.argsort(); y.topk(1,0); y.kthvalue(2,0); y.mode(0);
y.quantile(0.5); y.softmax(1); y.logsumexp(0); y.cumsum(0); y.cummax(0); y.prod(0); (y>0).any(0); (y>0).all(); y.norm();
torch.linalg.vector_norm(y,ord=float('inf'),dim=0); torch.linalg.vector_norm(y,ord=float('inf')); F.normalize(y,dim=0); lin(y);
bne(y); ln(y); emb(i); y@y.T; y.T@y; y@torch.ones(3); torch.outer(i.float(),i.float()); torch.dot(i.float(),i.float());
torch.bmm(y[None],y.T[None]); torch.einsum('ij,kj->ik',y,y); torch.cdist(y,y); y+torch.ones(1,3); y+torch.ones(2,3);
y+torch.ones(3,3); y+i[:,None]; y.T+i; i*torch.arange(2); torch.where(i>1,i,torch.arange(3)); y.expand(1,3); y[None].expand(4,-1,3);
torch.ones(1,3).expand_as(y); torch.broadcast_to(i[:,None],(2,3)); y.view(-1); y.view(3,-1); y.view(-1,1,3); y.reshape(-1,6);
i.reshape(()); y.flatten(); i.unflatten(0,(2,-1)); y.T.reshape(-1); y.T.view(3,-1); y.T.contiguous().view(-1); y.T.contiguous();
y.T.clone(); torch.zeros_like(y.T); y.T*2; y.chunk(2); y.split(1); torch.split(y,2); y.unbind(1); y.tensor_split(2);
[r*2 for r in y]; len(y); i.tolist(); bool(i); y.numel(); y[0]; y[-1]; y[1:]; y[:-1]; y[::2]; (y.__setitem__(0,1.0),y)[1];
(y.__setitem__(slice(None),torch.ones(1,3)),y)[1]; y.narrow(0,0,1); y.select(0,1); y.index_select(0,torch.tensor([0]));
y.gather(0,torch.zeros(1,3,dtype=torch.int64)); y.take(torch.tensor([0,2])); y.flip(0); y.roll(1,0); y.rot90(); y.repeat(2,1);
i.tile(2); y.repeat_interleave(2,0); torch.diag(i); y.diagonal(); y.tril(); y.trace(); y.diff(dim=0);
torch.meshgrid(i,i,indexing='ij'); torch.cartesian_prod(i,i); torch.combinations(i); F.pdist(y); F.pad(y,(0,0,1,1));
F.pad(y.T[None],(1,1),mode='reflect'); F.pad(y.T[None],(1,1),mode='circular'); F.conv1d(y.T[None],torch.ones(2,3,2));
F.avg_pool1d(y.T[None],2); F.max_pool1d(y.T[None],2); F.interpolate(y.T[None],scale_factor=2);
F.interpolate(y.T[None],size=4,mode='linear'); F.adaptive_avg_pool1d(y.T[None],2); F.cross_entropy(y,i%3);
F.mse_loss(y,torch.zeros(1,3)); F.mse_loss(y,y*2); F.nll_loss(y,i%3,reduction='none'); F.cosine_similarity(y,torch.ones(1,3));
F.one_hot(i,8); i.bincount(minlength=8); y.histc(4); i.unique(); i.nonzero(); torch.searchsorted(torch.arange(4),i);
torch.isin(i,torch.tensor([1,2])); torch.zeros(8,3).index_add(0,i,y); torch.zeros(8).scatter(0,i,i.float());
torch.zeros(8).scatter_add(0,i,torch.ones(2)); torch.zeros(8,3).index_put((i,),y); torch.zeros(8,3).index_put((i,),torch.ones(1,3));
torch.zeros(4,3).masked_scatter(torch.eye(4,3)>0,y); torch.zeros(8,3).index_fill(0,i,1.0);
F.scaled_dot_product_attention(y[None],y[None],y[None]); F.gelu(y).sum(0); (y.T@y+torch.eye(3)).inverse(); torch.cov(y);
torch.corrcoef(y); torch.fft.fft(y,dim=0); torch.minimum(y,y.mean(0)); torch.equal(y,y); torch.arange(y.shape[0])*2;
torch.full((y.shape[0],),1.0); torch.eye(y.shape[0]); torch.linspace(0,1,y.shape[0]); y.sum()/y.shape[0]; 6//y.shape[0];
1 if y.shape[0]==0 else 2; y if len(y)>1 else y*0; torch.addmm(torch.ones(3),y,torch.ones(3,3));
torch.addmm(i[:,None].float(),y,torch.ones(3,3)); F.group_norm(y.T[None],3); F.instance_norm(y.T[None]); F.glu(y.T.contiguous(),-1);
y.mT; y.movedim(0,1); y.swapaxes(0,1); y.renorm(2,0,1.0); torch.lerp(y,torch.zeros(1,3),0.5); torch.addcmul(torch.zeros(1,3),y,y);
y.clamp(max=y.mean()); y.aminmax(); y.nanmean(); y.logcumsumexp(0); F.kl_div(y,y.exp(),reduction='batchmean'); torch.vander(i);
torch.block_diag(y,y); torch.hstack([i,i]); torch.vstack([y,y]); torch.dstack([i,i]); torch.atleast_2d(i); torch.column_stack([i,i]);
torch.trapezoid(i.float()); torch.linalg.cross(y,torch.ones(1,3)); torch.kron(i,i); torch.tensordot(y,y,([0],[0]));
(y.numel()==0, y+1); torch.ones(3,2,3)@y[:,:,None]; torch.bmm(y[:,None,:],torch.ones(3,3,4));
torch.linalg.solve(A3.expand(3,3,3),y[:,:,None]); torch.linalg.cross(y,O3); torch.cross(y,O3,dim=1); torch.einsum('bi,bi->b',y,O3);
F.bilinear(y,O3,torch.ones(2,3,3)); torch.zeros(8,8).index_put((i,I3),torch.tensor(1.)); torch.take_along_dim(O3,i[None]%3,0);
F.pairwise_distance(y,O3); torch.cdist(y[:,None],O3[:,None]); torch.where(i[:,None]>1,y,O3); torch.lerp(y,O3,0.3);
torch.addcmul(O3,y,y); F.mse_loss(y,O3); F.smooth_l1_loss(y,O3,reduction='none'); F.binary_cross_entropy_with_logits(y,O3.sigmoid());
F.kl_div(y,O3,reduction='none'); F.margin_ranking_loss(y,O3,torch.ones(3,3)); F.triplet_margin_loss(y,O3,O3+1); torch.dist(y,O3);
torch.tensordot(y,O3,([1],[1])); torch.addmm(torch.ones(3,4),y,torch.ones(3,4)); torch.addmm(y,O3,O3);
torch.baddbmm(y[None],O3[None],O3[None]); F.scaled_dot_product_attention(O3[None],O3[None],O3[None],attn_mask=y[None]);
torch.maximum(y,O3); torch.pow(O3.abs(),y); torch.atan2(y,O3); torch.fmod(y,O3); torch.xlogy(O3,y.abs()); torch.isclose(y,O3); y==O3;
O3.masked_fill(y>0,1.0); y.masked_fill(O3>0,1.0); O3.clone().add_(y); y.clone().mul_(O3); O3.clone().copy_(y);
(lambda z:(z.__setitem__(slice(None),y),z)[1])(O3.clone()); torch.heaviside(y,O3); torch.polar(y.abs(),O3); torch.complex(y,O3);
torch.kron(y,O3); torch.bucketize(i,I3); F.gaussian_nll_loss(y,O3,torch.ones(3,3)); F.poisson_nll_loss(y,O3);
F.embedding_bag(i,torch.ones(8,2),torch.tensor([0])); torch.hstack([y,O3]); torch.linalg.vecdot(y,O3); torch.inner(y,O3); O3@y;
torch.addr(O3,i.float(),I3.float()); y.clamp(O3-1,O3+1); (torch.distributions.Normal(y,1.0).log_prob(O3));
torch.distributions.Categorical(logits=y).log_prob(I3);
torch.distributions.kl_divergence(torch.distributions.Normal(y,1.),torch.distributions.Normal(O3,1.));
torch.distributions.Bernoulli(logits=y).entropy()+O3; F.prelu(y,torch.tensor([.1,.2,.3]));
torch.linalg.lu_factor(y[None].expand(2,-1,-1))[0]; torch.linalg.solve_triangular(A3.triu(),y.T,upper=True);
torch.cholesky_solve(y.T,torch.linalg.cholesky(A3@A3.T)); torch.cartesian_prod(i,I3); torch.atleast_3d(y); F.softplus(y)+O3[:1];
(y+O3).sum_to_size(1,3); torch.logaddexp(y,O3); torch.ldexp(O3,i[:,None]); i&I3; torch.float_power(O3.abs(),y);
torch.dot(i.float(),I3.float()); O3@i.float(); F.conv1d(O3[None],y[:,:,None]); F.linear(O3,y);
F.linear(O3,torch.ones(3,3),i.float()); F.layer_norm(O3,(3,),y.sum(0)); F.batch_norm(O3,None,None,i.float(),None,True);
F.embedding(torch.zeros(2,dtype=torch.int64),y); O3.scatter(0,i[None]%3,1.0); O3.gather(1,i[:,None]%3);
torch.fft.ifft(torch.fft.fft(y,n=4,dim=0),dim=0).real; F.cross_entropy(O3,I3,weight=y.sum(1).abs())
"""
COUNTS = (3, 1, 0, 2, 6, 1)

Choice = tuple[torch.Tensor, torch.Tensor]


def masked(x: torch.Tensor, m: torch.Tensor) -> Choice:
    return x[m], m.nonzero()[:, 0]


def selected(x: torch.Tensor, m: torch.Tensor) -> Choice:
    (i,) = torch.where(m)
    return x.index_select(0, i), i


ROWS = {"mask": masked, "where": selected}


def programs(text: str) -> list[str]:
    return [e.strip() for e in text.replace("\n", " ").split(";")]


def names() -> dict[str, Any]:
    """What the programs name."""
    torch.manual_seed(0)
    norm, fixed = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    return {"torch": torch, "F": F, "lin": nn.Linear(3, 4), "bn": norm, "bne": fixed, "ln": nn.LayerNorm(3), "emb": nn.Embedding(8, 3),
            "A3": torch.randn(3, 3) + 3 * torch.eye(3), "O3": torch.randn(3, 3), "I3": torch.arange(3)}  # fmt: skip


def outcome(fn: Any, x: torch.Tensor, m: torch.Tensor) -> tuple[Any, str]:
    try:
        return fn(x, m), ""
    except Exception as e:
        return None, type(e).__name__


def check(program: str, rows: str, dynamic: bool | None) -> None:
    space = names()
    body, choose = eval(f"lambda y, i: {program}", space), ROWS[rows]
    compiled = torchsmith.compile(lambda x, m: body(*choose(x, m)), dynamic=dynamic)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in COUNTS:
            x, m = torch.randn(6, 3), torch.zeros(6, dtype=torch.bool)
            m[torch.randperm(6)[:k]] = True
            before = {n: b.clone() for n, b in space["bn"].named_buffers()}
            want, refused = outcome(lambda x, m: body(*choose(x, m)), x, m)
            space["bn"].load_state_dict(before, strict=False)
            got, also = outcome(compiled, x, m)
            assert also == refused, f"{k} rows: eager {refused or 'returns'}, compiled {also or 'returns'}"
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, k=k: f"{k} rows: {text}")


@pytest.mark.parametrize("program", programs(QUICK))
def test_sizes_that_the_data_tell(program: str) -> None:
    check(program, "mask", None)


@pytest.mark.heavy
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("program", programs(QUICK) + programs(MORE))
def test_more(program: str, rows: str) -> None:
    for dynamic in (None, True):
        torchsmith.compiler.reset()
        check(program, rows, dynamic)

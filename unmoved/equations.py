"""What the paper proves, as functions of tables: its lemma, propositions and bounds in their corrected forms.

`unmoved verify` evaluates them on networks, tests/test_equations.py on random tables. Equations are numbered as in the
paper; docs/deviations.md lists its misprints. Tables have n transformations in rows and A actions in columns, both
finite, so that every expectation is exact. Losses and targets are the library's own terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmoved.losses import ActorPass, Improve, View, samples, soft_target
from unmoved.transforms import Identity


def discrete_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1).clamp(min=0)


def divergences(pi: Tensor) -> Tensor:
    """D[eta, mu] = KL(pi_eta || pi_mu), (n, n)."""
    return discrete_kl(pi[:, None], pi[None])


def variance_of_mean(values: Tensor, n: int) -> Tensor:
    """Of the mean over n independent draws from equally likely values: all n-tuples are enumerated. Eqs. 55-58."""
    return torch.cartesian_prod(*[values] * n).reshape(-1, n).mean(1).var(correction=0)


# ------------------------------------------------------------------------------------------------ the critic


def lemma_law(P: Tensor, identity: int, a_Q: float) -> Tensor:
    """Lemma 1: the law of nu^ for which (Q(s) - y)^2 + a_Q E_nu (Q(f_nu(s)) - y)^2 is (a_Q + 1) times the implicit
    loss: P(nu^ = id) = (P(id) a_Q + 1) / (a_Q + 1), P(nu^ = tau) = P(tau) a_Q / (a_Q + 1)."""
    P_hat = P * a_Q / (a_Q + 1)
    P_hat[identity] = (P[identity] * a_Q + 1) / (a_Q + 1)
    return P_hat


def linear_excess(W: Tensor, f: Tensor) -> Tensor:
    """Tr(W^T W Var f) over equally likely states f (n, d): what augmentation adds to a linear critic's loss.
    Eqs. 32-39. W (1, d) acts on the state: the print has the action's matrix in the trace."""
    return torch.trace(W.T @ W @ f.T.cov(correction=0))


def second_order_excess(J: Tensor, f: Tensor) -> Tensor:
    """||J_Q(E f) H Lambda^(1/2)||_F^2 with Var f = H Lambda H^T: J (d,), equally likely states f (n, d). Eqs. 40-41."""
    _, root, H = torch.linalg.svd(f - f.mean(0), full_matrices=False)
    return (J @ H.T * root).square().sum() / len(f)


def l_all(Q: Tensor, y: Tensor) -> Tensor:
    """1/(MK) sum_mk (Q_m - y_k)^2 of Q (M,) and y (K,): DrQ's loss plus the variance of y. Eqs. 55-58."""
    return (Q[:, None] - y[None]).square().mean()


# ------------------------------------------------------------------------------------------------ the actor


def actor_loss(pi: Tensor, Q: Tensor, alpha: Tensor) -> Tensor:
    """E_a [Improve] at each transformation, (n,): the A actions are the batch, weighted by the policy. Eq. 6."""
    mu = View("mu", Identity(), len(pi))
    actor = ActorPass({}, {}, {}, alpha)
    for s in samples(mu):
        actor.log_pi[s.key], actor.Q[s.key] = pi[s.index].log(), torch.stack([Q[s.index], Q[s.index] + 1])
    return torch.stack([(pi[s.index] * Improve(s)(actor)).sum() for s in samples(mu)])


def implicit_kl_terms(pi: Tensor, pi_s: Tensor, Q: Tensor, Q_s: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prop. 4.1 (Eqs. 8, 24-31), per transformation: sum_a pi_mu log(pi_s/g_s), KL(pi_mu || pi_s), and what is left
    where the critic is not invariant, sum_a pi_mu log(g_s/g_mu); g = softmax(Q/alpha). Eq. 6 is alpha times their sum
    minus alpha log Z."""
    g_s, g = torch.softmax(Q_s / alpha, -1), torch.softmax(Q / alpha, -1)
    return (pi * (pi_s / g_s).log()).sum(-1), discrete_kl(pi, pi_s), (pi * (g_s / g).log()).sum(-1)


def actor_bound(pi: Tensor, g: Tensor) -> Tensor:
    """E_mu (E_eta [D + c(mu) sqrt(2 D)])^2, c(mu) = max_a |log pi_mu - log g|: Prop. 5.1 (Eqs. 13, 59-72) as printed.
    The loss has a factor alpha, so alpha^2 times it bounds the variance."""
    D, c = divergences(pi), (pi.log() - g.log()).abs().amax(-1)
    return (D + c * (2 * D).sqrt()).mean(0).square().mean()


def ddpg_actor_bound(M: Tensor, H: Tensor) -> Tensor:
    """L^2/8 E |M_nu - M_eta|^2 |M_nu + M_eta|^2 bounds the variance of 1/2 M^T (-H) M, M = pi(f(s)) - pi* (n, |A|),
    L = |H|. Corrected: the printed bound is not homogeneous in Q."""
    L = torch.linalg.matrix_norm(H, 2)
    apart, together = (M[:, None] - M[None]).square().sum(-1), (M[:, None] + M[None]).square().sum(-1)
    return L**2 / 8 * (apart * together).mean()


# ------------------------------------------------------------------------------------------------ the target


def discrete_targets(pi: Tensor, Q: Tensor, alpha: Tensor, gamma: float, reward: float) -> Tensor:
    """y of every transformation and action, (n, A)."""
    ones = torch.ones_like(pi)
    return soft_target(reward * ones, gamma * ones, torch.stack([Q + 1, Q]), alpha, pi.log())


def target_bound(pi: Tensor, size: Tensor, alpha: Tensor, gamma: float) -> Tensor:
    """E_mu (E_eta [size(mu) sqrt(2 D) + gamma alpha D])^2. Prop. 5.2 (Eqs. 14, 73-93) with size = max |y - r|, which
    the print has without the absolute value, and the entropy inside gamma."""
    D = divergences(pi)
    return (size * (2 * D).sqrt() + gamma * alpha * D).mean(0).square().mean()


def target_variance_parts(pi: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Var_{mu,a'}[y], E[(y - E_a' y)^2] and Var_mu[E_a' y]: the first is the sum of the others. Eqs. 73-93."""
    P = pi / len(pi)  # of (mu, a')
    of_mu = (pi * y).sum(-1, keepdim=True)
    total = (P * (y - (P * y).sum()).square()).sum()
    return total, (P * (y - of_mu).square()).sum(), of_mu.var(correction=0)


# ------------------------------------------------------------------------------------------------ the target's bias


def expected_target(P: Tensor, reward: Tensor, pi: Tensor, Q: Tensor, gamma: float, alpha: Tensor) -> Tensor:
    """E y (S, A) for transitions P (S, A, S), an invariant policy pi (S, A) and a critic Q (T, S, A) at each
    transformation of s'. Eqs. 42-44."""
    shape = (*reward.shape, *Q.shape)  # s, a, mu, s', a'
    r = reward[:, :, None, None, None].expand(shape)
    y = soft_target(r, torch.full(shape, gamma), Q.expand(2, *shape), alpha, pi.log().expand(shape))
    return torch.einsum("ijt,tk,ijmtk->ij", P, pi, y) / len(Q)


def state_action_chain(P: Tensor, pi: Tensor) -> Tensor:
    """Transition matrix of (s, a), (S A, S A)."""
    n = P.shape[0] * P.shape[1]
    return torch.einsum("ijt,tk->ijtk", P, pi).reshape(n, n)


def soft_q(P: Tensor, reward: Tensor, pi: Tensor, gamma: float, alpha: Tensor) -> Tensor:
    """Q^pi (S, A) of a finite Markov decision process, entropy bonus included."""
    chain, entropy = state_action_chain(P, pi), -(pi * pi.log()).sum(-1)
    right = (reward + gamma * alpha * P @ entropy).flatten()
    return torch.linalg.solve(torch.eye(len(chain)) - gamma * chain, right).reshape(reward.shape)


def stationary_law(P: Tensor, pi: Tensor) -> Tensor:
    """Of (s, a), (S, A)."""
    chain = state_action_chain(P, pi)
    return torch.linalg.solve(torch.eye(len(chain)) - chain.T + 1, torch.ones(len(chain))).reshape(P.shape[:2])

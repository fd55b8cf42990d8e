"""The one order in which a step observes, looks, decides and acts; and what a legal plan is.

Owns no state. Invariant: whatever drives a policy, engine or simulator, does it through drive_step().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .types import EngineView, Event, Executor, Phase, Plan, Policy

HOLD_NOTHING = Plan()  # the steady step's answer: no verb, the engine's own admission

Recorder = Callable[[Sequence[Event], EngineView, Plan], None]


def drive_step(policy: Policy, executor: Executor, events: Sequence[Event], journal: Recorder | None = None) -> Plan:
    """Observe, look, decide, act; afterwards the engine forms its batch.

    Order of the verbs: park, publish, load, admit. Memory is given back before it is
    promised, and publishing never touches what was parked in the same step.
    """
    for event in events:
        policy.observe(event)
    view = executor.view()
    plan = policy.plan(view)
    if journal is not None:
        journal(events, view, plan)
    for rid in plan.park:
        executor.park(rid)
    for rid, up_to in plan.publish:
        executor.publish(rid, up_to)
    if plan.load:
        executor.load(plan.load)
    executor.admit(plan.admit, reserve_tokens=plan.reserve_tokens, prefill_tokens=plan.prefill_tokens)
    return plan


def check_plan(view: EngineView, plan: Plan) -> list[str]:
    """Every way in which `plan` is illegal for `view`; empty when it is legal.

    For tests, the simulator and `--tokenflow-check-plans`: it asks for all views, which a steady step must not.
    """
    by_rid = {r.rid: r for r in view.requests()}
    problems: list[str] = []
    named = [*plan.park, *(rid for rid, _ in plan.publish)]
    named += [*plan.load, *(plan.admit or ())]
    problems += [f"unknown rid {rid!r}" for rid in named if rid not in by_rid]
    if problems:
        return problems
    away = plan.park
    if len(set(away)) != len(away):
        problems.append(f"a request leaves twice: {away}")
    if len(set(plan.admit or ())) != len(plan.admit or ()):
        problems.append(f"a request is admitted twice: {plan.admit}")
    for rid in away:
        r = by_rid[rid]
        if r.phase is not Phase.RUNNING or r.output_tokens == 0:
            problems.append(f"{rid}: only a stream whose first token has left can be parked, it is {r.phase.value}")
        if not r.preemptible:
            problems.append(f"{rid}: not preemptible")
        if rid in (plan.admit or ()):
            problems.append(f"{rid}: admitted in the step it was parked in")
    for rid in plan.admit or ():
        if by_rid[rid].phase not in (Phase.WAITING, Phase.PARKED):
            problems.append(f"{rid}: cannot be admitted, it is {by_rid[rid].phase.value}")
    for rid, up_to in plan.publish:
        r = by_rid[rid]
        if r.phase is not Phase.RUNNING or not r.published_tokens < up_to <= r.context_tokens:
            problems.append(f"{rid}: cannot publish up to {up_to} of {r.context_tokens} ({r.phase.value})")
    if len(set(plan.load)) != len(plan.load):
        problems.append(f"a request is loaded twice: {plan.load}")
    for rid in plan.load:
        r = by_rid[rid]
        if r.phase not in (Phase.WAITING, Phase.PARKED) or r.host_hit_tokens == 0 or r.held_tokens:
            problems.append(f"{rid}: nothing to load, it is {r.phase.value} with {r.host_hit_tokens} on the host")
        if rid in (plan.admit or ()):
            problems.append(f"{rid}: admitted in the step its load starts in")
    if plan.load and (view.load_slots <= 0 or not view.host_ok):
        problems.append(f"loads {plan.load} with {view.load_slots} slots, host {'ok' if view.host_ok else 'not ok'}")
    freed = sum(by_rid[rid].frees_tokens for rid in plan.park)
    taken = sum(by_rid[rid].takes_tokens for rid in plan.admit or ())
    taken += sum(by_rid[rid].host_hit_tokens for rid in plan.load)
    # The prefill of a prompt larger than one chunk spreads over steps; the engine admits in order and stops where
    # memory ends, so naming one request more than fits is a promise the engine cannot keep.
    # An empty engine tries whoever is first. `view.running` still counts who ended in this very step.
    empty = not any(r.phase in (Phase.RUNNING, Phase.PREFILL) for r in view.requests())
    alone = empty and len(plan.admit or ()) == 1
    if (plan.admit or plan.load) and not alone and taken > view.device_free_tokens + freed:
        problems.append(f"admits {taken} tokens into {view.device_free_tokens} free + {freed} freed")
    return problems

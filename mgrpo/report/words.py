"""What a recipe's options come to, in words and formulas: rewards, who is compared with whom, the loss.

Pure functions of the config. A line is a term and what it means; lines without a term go on with the one above.

    R, A        reward and advantage of a trajectory (of a turn, where turns are compared)
    mu, sigma   mean and standard deviation of what it is compared with
    w, n, d_k   weight and sampled tokens of a trajectory, calls of the agent in its attempt
    c           what a token counts in the loss; W, N, M its denominators
    pi          the policy that learns; r = pi / pi_old
"""

from __future__ import annotations

from mgrpo.config import AgentConfig, Config, LearnerConfig, StageConfig

Line = tuple[str, str]


# ---------------------------------------------------------------- rewards


def reward_lines(config: Config) -> list[Line]:
    lines = _graded(config)
    for name, agent in config.agents.items():
        if agent.overlong_buffer_len:
            lines.append((f"overlong({name})", _overlong(agent)))
        if agent.mask_truncated:
            text = "a trajectory that a limit of tokens or turns cut off leaves statistics and loss"
            lines.append((f"masked({name})", text))
    for name, coefs in _kl_in_reward(config).items():
        for coef, estimator in coefs:
            text = f"R loses {coef:g} times the sum over its sampled tokens of {estimator} = {_ESTIMATORS[estimator]}"
            lines.append((f"KL({name})", f"{text}, with the pi that sampled them; {_REFERENCE}"))
    return lines


def _graded(config: Config) -> list[Line]:
    if config.reward is not None:
        return [("R", f"by your function {config.reward}(rollout, grades, weights, unknown)")]
    lines = []
    for name, agent in config.agents.items():
        terms = " + ".join(f"{weight:g} {term}" for term, weight in (agent.reward_weights or {}).items() if weight)
        equation = "equation 4" if agent.role == "planner" else "equation 5"
        lines.append((f"R({name})", f"{terms} if every turn parses and it answers, else 0 ({equation})"))
    unknown = "its weight is shared out over" if config.rollout.unknown_reward == "renormalise" else "it excludes"
    what = "the known terms" if config.rollout.unknown_reward == "renormalise" else "the trajectory"
    expert = f"expert: the sub-answer's grade ({config.expert['type']})"
    meaning = f"correct: the answer against the gold; correct_main: the planner's, copied; {expert}."
    return [*lines, ("terms", f"{meaning} A term that nobody could grade is unknown, not 0: {unknown} {what}.")]


def _overlong(agent: AgentConfig) -> str:
    limit, factor = agent.max_tokens_per_turn, agent.overlong_penalty_factor
    free = limit - agent.overlong_buffer_len
    return f"added to R: 0 while its longest turn has up to {free} tokens, then down to {-factor:g} at {limit}"


# ---------------------------------------------------------------- who is compared with whom


def comparison_lines(config: Config) -> list[Line]:
    """One line per agent and way of comparing, then what is never compared and which questions are left out."""
    lines: list[Line] = []
    every: list[tuple[str, LearnerConfig]] = []
    for name, agent in config.agents.items():
        plans = _rewarded(config, name)
        every += [(name, own) for _, own in plans]
        lines += [(name, text) for text in dict.fromkeys(compared(config, name, k, own) for k, own in plans)]
        if not plans:
            lines.append((name, _not_compared(config, name, agent)))
    return [*lines, *_filtered(config), *_never(config, every)]


def _rewarded(config: Config, name: str) -> list[tuple[int, LearnerConfig]]:
    """K and learner of every stage in which ``name`` learns from rewards."""
    stages = [stage for stage in config.stages if name in config.trained(stage) and stage.collect == "team"]
    return [(config.num_generations(stage), config.learner_for(name, stage)) for stage in stages]


def _not_compared(config: Config, name: str, agent: AgentConfig) -> str:
    if agent.trainable:
        return "nobody; it does not learn from rewards."
    if config.owner(name) != name:
        return f"nobody; its weights are {config.owner(name)}'s, and its own rows are not learned from."
    return "nobody; it is frozen."


def compared(config: Config, name: str, k: int, own: LearnerConfig) -> str:
    """Who ``name`` is compared with where a question has ``k`` attempts, and how that makes an advantage."""
    agent = config.agents[name]
    pooled = config.sharing(config.owner(name)) if own.compare_with == "query" else (name,)
    inherits = own.compare_with == "parent" and agent.role == "subagent"
    weighted = not inherits and any(config.agents[member].align == "weight" for member in pooled)
    counts = "" if inherits or agent.role == "planner" else f"; {_counts(agent)}"
    white = " Then A gets mean 0 and standard deviation 1 over all its sampled tokens of the step."
    end = white if own.whiten_advantages else ""
    return f"{_whom(agent, k, own, pooled)}{counts}. {_advantage(own, weighted, _equation(agent, own))}.{end}"


def _whom(agent: AgentConfig, k: int, own: LearnerConfig, pooled: tuple[str, ...]) -> str:
    question = f"the {k} attempts at one question"
    mine = f"its {k} attempts at one question" if agent.role == "planner" else f"all its calls in {question}"
    if own.compare_with == "batch":
        return f"all its {'attempts' if agent.role == 'planner' else 'calls'} in the step, over all questions"
    if own.compare_with == "agent_turn":
        return f"each turn with the same turn of {mine}"
    if own.compare_with == "query" and len(pooled) > 1:
        return f"all trajectories of {' and '.join(pooled)} in {question}, pooled"
    if own.compare_with == "parent" and agent.role == "subagent":
        return f"nobody itself: it inherits the A of its attempt's planner, whose R is compared over {question}"
    return f"{mine}, with each other"


def _counts(agent: AgentConfig) -> str:
    d = agent.trajectories_per_rollout
    return {
        "weight": f"a call of an attempt with d_k calls counts {d}/d_k, so that every attempt counts {d}",
        "resample": f"calls are duplicated or dropped at random to {d} per attempt",
        "none": "every call counts 1, so that attempts with many calls count more",
        None: "every call counts 1, so that attempts with many calls count more",
    }[agent.align]


def _advantage(own: LearnerConfig, weighted: bool, equation: str) -> str:
    kind = ("weighted " if weighted else "") + ("unbiased" if own.std_unbiased else "population")
    mean = ("weighted " if weighted else "") + ("mean mu of the others" if own.leave_one_out else "mean mu")
    if own.scale_rewards == "none":
        return f"A = R - mu: {mean}{equation}"
    over = " of all its R in the step" if own.scale_rewards == "batch" else ""
    return f"A = (R - mu) / sigma: {mean}, {kind} standard deviation sigma{over}{equation}"


def _equation(agent: AgentConfig, own: LearnerConfig) -> str:
    """The paper's, where nothing but sigma differs from it."""
    others = own.std_unbiased or own.leave_one_out or own.whiten_advantages or own.scale_rewards == "batch"
    if own.compare_with != "agent" or others:
        return ""
    number = 10 if agent.role == "planner" else 13
    return f" (equation {number})" if own.scale_rewards == "group" else f" (equation {number} without sigma)"


def _never(config: Config, every: list[tuple[str, LearnerConfig]]) -> list[Line]:
    if not every:
        return []
    across_questions = any(own.compare_with == "batch" for _, own in every)
    in_scale = any(own.scale_rewards == "batch" or own.whiten_advantages for _, own in every)
    across_agents = any(
        own.compare_with == "query" and len(config.sharing(config.owner(name))) > 1 for name, own in every
    )
    never = [] if across_questions else [f"across questions{', but for the scale of A' if in_scale else ''}"]
    never += [] if across_agents else ["across agents"]
    before = " before A is whitened" if any(own.whiten_advantages for _, own in every) else ""
    ties = f"Equal R, or a group of one, gives A = 0{before}; there is no epsilon."
    return [("never", f"{', and never '.join(never)}. {ties}")] if never else [("ties", ties)]


def _filtered(config: Config) -> list[Line]:
    own = config.filter_groups
    if not own.enable:
        return []
    what = f"questions whose attempts all have the same {own.metric}, before shaping, are replaced by others"
    return [("left out", f"{what}; at most {own.max_num_gen_batches} times the questions of a step are asked.")]


# ---------------------------------------------------------------- loss


def loss_lines(config: Config) -> list[Line]:
    """The formula of every agent, with the recipe's numbers in its denominators; stages with the same one together."""
    lines: list[Line] = []
    used: list[LearnerConfig] = []
    for name in config.agents:
        stages: dict[tuple[str, ...], list[str]] = {}
        for stage in config.stages:
            if name in config.trained(stage):
                own = config.learner_for(name, stage)
                used.append(own)
                key = (f"loss = {objective(own)}", coefficient(config, stage, name, own), *_remarks(config, name, own))
                stages.setdefault(key, []).append(stage.name)
        for texts, names in stages.items():
            terms = [f"{name} in {', '.join(names)}", *[""] * (len(texts) - 1)]
            lines += zip(terms, texts, strict=True)
    return [*lines, ("", _legend(config, used))]


def objective(own: LearnerConfig) -> str:
    """The sum over tokens that is descended; equations 14 to 17 where nothing is set."""
    if own.policy_loss == "sft":
        return "- sum of c log pi"
    plain = terms = _surrogate(own)
    if _corrects(own):
        terms = f"v {terms}"
    if own.kl_coef and own.kl_in == "loss":
        terms += f" - {own.kl_coef:g} {own.kl_estimator}"
    if own.entropy_coef:
        terms += f" + {own.entropy_coef:g} H"
    return f"- sum of c {terms}" if terms == plain else f"- sum of c [{terms}]"


def _corrects(own: LearnerConfig) -> bool:
    return own.policy_loss != "sft" and own.rollout_is not in (None, "none")


def _surrogate(own: LearnerConfig) -> str:
    if own.policy_loss == "reinforce":
        return "A log pi"
    clipped = f"clip(r, {1 - own.clip_ratio_low:g}, {1 + own.clip_ratio_high:g})"
    if own.policy_loss == "cispo":
        return f"sg({clipped}) A log pi"
    surrogate = f"min(r A, {clipped} A)"
    return surrogate if own.clip_ratio_c is None else f"max({surrogate}, {own.clip_ratio_c:g} A if A < 0)"


def coefficient(config: Config, stage: StageConfig, name: str, own: LearnerConfig) -> str:
    """What one sampled token counts under the aggregation mode, with its denominators in numbers where they are known.

    n, W as in the legend; the modes are those of algorithm/coefficients.py.
    """
    agent, taught = config.agents[name], own.policy_loss == "sft"
    aligned = agent.role == "subagent" and agent.align in ("weight", "resample") and not taught
    d = agent.trajectories_per_rollout or 1
    w = "1" if not aligned else f"{d}/d_k" if agent.align == "weight" else "times drawn"
    whole = f"W = {_total(config, stage, name, own, d if aligned else None)}"
    formulas = {
        "seq-mean-token-mean": f"c = w / (n W), w = {w}, {whole}",
        "seq-mean-token-sum": f"c = w / W, w = {w}, {whole}",
        "seq-mean-token-sum-norm": f"c = w / (L W), w = {w}, L = {_length(agent, own)}, {whole}",
        "token-mean": f"c = w / N, w = {w}, N = sum of w n",
        "rollout-mean": f"c = w / (N M), w = {w}, N = sum of w n in its attempt, M = number of attempts with rows",
    }
    return f"{own.loss_agg_mode}: {formulas[own.loss_agg_mode]}"


def _total(config: Config, stage: StageConfig, name: str, own: LearnerConfig, d: int | None) -> str:
    """The sum of w over what has one denominator; ``d`` is None where nothing is aligned."""
    together = config.sharing(config.owner(name))
    if own.loss_denominator == "weights" and len(together) > 1:
        return f"sum of w over {' and '.join(together)}"
    attempts = stage.groups_per_step // own.num_minibatches * config.num_generations(stage)
    if config.agents[name].role == "planner":
        return f"{attempts} (attempts)"
    if d is None:
        return "number of its calls"
    return f"{attempts} x {d} = {attempts * d}, less {d} for each attempt without a call"


def _length(agent: AgentConfig, own: LearnerConfig) -> str:
    if own.loss_scale_factor is not None:
        return f"{own.loss_scale_factor:g}"
    return f"{agent.most_tokens}, the most it can sample"


def _remarks(config: Config, name: str, own: LearnerConfig) -> list[str]:
    """What else there is to say: symbols beyond the legend, updates in a step, agents that share weights."""
    remarks = [] if own.policy_loss == "sft" else _symbols(own)
    if (updates := own.num_minibatches * own.num_iterations) > 1:
        times = f"{own.num_minibatches} minibatches of whole questions, {own.num_iterations} times"
        remarks.append(f"{updates} updates a step ({times}); sums and denominators are those of one update")
    together = config.sharing(config.owner(name))
    if len(together) > 1:
        losses = f"the losses of {' and '.join(together)} are added, since they share weights"
        one = "; sums and denominators are over the rows of all of them"
        remarks.append(losses + (one if own.loss_denominator == "weights" else ""))
    return remarks


def _symbols(own: LearnerConfig) -> list[str]:
    symbols = []
    if own.policy_loss in ("ppo", "cispo") and own.importance_sampling_level == "sequence":
        symbols.append("r = geometric mean of pi / pi_old over its row's sampled tokens")
    if _corrects(own):
        level = "per token" if own.rollout_is == "token" else "of the products over its row's sampled tokens"
        text = f"v = min(pi_old / pi_sampled, {own.rollout_is_threshold:g}) {level}"
        symbols.append(f"{text}; pi_old: pi before the step's first update, pi_sampled: what sampled it")
    if own.rollout_rs != "none":
        low, high = own.rollout_rs_threshold
        what = "tokens whose" if own.rollout_rs == "token" else "rows whose product of"
        symbols.append(f"{what} pi / pi_sampled before the update is outside [{low:g}, {high:g}] are in no sum, n or W")
    if own.kl_coef and own.kl_in == "loss":
        symbols.append(f"{own.kl_estimator} = {_ESTIMATORS[own.kl_estimator]}; {_REFERENCE}")
    if own.entropy_coef:
        symbols.append("H = entropy of pi at the token, in nats")
    return symbols


_REFERENCE = "pi_ref: the same weights as they were when reinforcement learning began"
_ESTIMATORS = {
    "k1": "log(pi / pi_ref)",
    "k2": "log(pi / pi_ref)^2 / 2",
    "k3": "pi_ref / pi - 1 + log(pi / pi_ref)",
}


def _kl_in_reward(config: Config) -> dict[str, list[tuple[float, str]]]:
    """Coefficient and estimator by agent, each once."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name in config.agents:
        plans = [own for _, own in _rewarded(config, name)]
        ways = [(p.kl_coef, str(p.kl_estimator)) for p in plans if p.kl_coef and p.kl_in == "reward"]
        if ways:
            found[name] = list(dict.fromkeys(ways))
    return found


def _legend(config: Config, used: list[LearnerConfig]) -> str:
    parts = []
    if any(own.policy_loss in ("ppo", "cispo") for own in used):
        told = any(_corrects(own) or own.importance_sampling_level == "sequence" for own in used)
        parts.append(f"{'Unless told above, ' if told else ''}r = pi / pi_old per token; pi_old sampled it.")
    if any(own.policy_loss == "cispo" for own in used):
        parts.append("sg: no gradient.")
    hot = [f"{agent.temperature:g} ({name})" for name, agent in config.agents.items() if agent.temperature != 1.0]
    if hot:
        parts.append(f"pi is at the sampling temperature {', '.join(hot)}.")
    counted = (
        "n: sampled tokens of the trajectory, W: sum of w; over all rows of the agent in the step, however they are"
    )
    return " ".join([*parts, f"{counted} split into micro-batches. A trajectory of unknown reward is in none."])

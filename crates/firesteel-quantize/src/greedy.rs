//! Greedy bit allocation by marginal return (Fox, Discrete optimization via marginal analysis, 1966):
//! which of several things are made larger, if only so much is to be had.

/// A size that a thing can have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rung {
    /// What it costs in this size.
    pub(crate) cost: f64,
    /// The harm that is left. The harm of different things is taken to add up.
    pub(crate) harm: f64,
}

/// When it is enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Goal {
    /// The cost of all together stays at or below this.
    Cost(f64),
    /// The harm of all together gets to this or below, or as low as it can.
    Harm(f64),
}

/// Chooses a rung of each ladder; each ladder begins with what a thing has at least. Step by step
/// what gains most for its cost is raised. Equal ladders give equal choices.
pub(crate) fn greedy(ladders: &[Vec<Rung>], goal: Goal) -> Vec<usize> {
    let start = vec![0; ladders.len()];
    let limit = match goal {
        Goal::Cost(limit) => limit,
        Goal::Harm(limit) => return reach(ladders, start, limit),
    };
    let left =
        limit - ladders.iter().filter_map(|rungs| rungs.first()).map(|r| r.cost).sum::<f64>();
    // What is large may no longer fit when its turn comes, so every first step is tried.
    let mut best = fill(ladders, start, left);
    for (index, rungs) in ladders.iter().enumerate() {
        for rung in 1..rungs.len() {
            let mut start = vec![0; ladders.len()];
            start[index] = rung;
            let (_, cost) = change(rungs, 0, rung);
            if cost <= left {
                let filled = fill(ladders, start, left - cost);
                if filled.1 < best.1 {
                    best = filled;
                }
            }
        }
    }
    best.0
}

/// What going from one rung to another gains and costs.
fn change(rungs: &[Rung], from: usize, to: usize) -> (f64, f64) {
    let (from, to) = (rungs[from], rungs[to]);
    (from.harm - to.harm, to.cost - from.cost)
}

/// The ladder whose next rung gains most for its cost and costs `left` at most, and that cost.
fn next(ladders: &[Vec<Rung>], at: &[usize], left: f64) -> Option<(usize, f64)> {
    let affordable = ladders.iter().zip(at).enumerate().filter_map(|(index, (rungs, at))| {
        if at + 1 >= rungs.len() {
            return None;
        }
        let (gain, cost) = change(rungs, *at, at + 1);
        (cost <= left).then_some((gain / cost, cost, index))
    });
    // The first of equals, so that the choice does not depend on anything else.
    let best = affordable.reduce(|best, other| if other.0 > best.0 { other } else { best });
    best.map(|(_, cost, index)| (index, cost))
}

fn harm(ladders: &[Vec<Rung>], at: &[usize]) -> f64 {
    ladders.iter().zip(at).filter_map(|(rungs, at)| rungs.get(*at)).map(|rung| rung.harm).sum()
}

/// Goes up from `at` while `left` lasts. Returns the rungs and the harm that is left.
fn fill(ladders: &[Vec<Rung>], mut at: Vec<usize>, mut left: f64) -> (Vec<usize>, f64) {
    while let Some((index, cost)) = next(ladders, &at, left) {
        left -= cost;
        at[index] += 1;
    }
    let harm = harm(ladders, &at);
    (at, harm)
}

/// Goes up from `at` until the harm is at `limit`, and then down again where that costs nothing.
fn reach(ladders: &[Vec<Rung>], mut at: Vec<usize>, limit: f64) -> Vec<usize> {
    let mut raised = Vec::new();
    while harm(ladders, &at) > limit
        && let Some((index, _)) = next(ladders, &at, f64::INFINITY)
    {
        at[index] += 1;
        raised.push(index);
    }
    for index in raised {
        at[index] -= 1;
        if harm(ladders, &at) > limit {
            at[index] += 1;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(rungs: &[(f64, f64)]) -> Vec<Rung> {
        rungs.iter().map(|&(cost, harm)| Rung { cost, harm }).collect()
    }

    #[test]
    fn what_gains_most_for_its_cost_is_raised_until_the_goal() {
        let ladders = [
            ladder(&[(1.0, 8.0), (2.0, 4.0), (3.0, 3.0)]),
            ladder(&[(1.0, 9.0), (5.0, 0.0)]),
            ladder(&[(1.0, 0.5)]),
        ];
        let cases = [
            (Goal::Cost(2.0), [0, 0, 0]),
            (Goal::Cost(3.9), [0, 0, 0]),
            (Goal::Cost(4.0), [1, 0, 0]),
            (Goal::Cost(5.0), [2, 0, 0]),
            // The first steps leave no room for the large one, which gains more.
            (Goal::Cost(7.0), [0, 1, 0]),
            (Goal::Cost(8.0), [1, 1, 0]),
            (Goal::Cost(1e9), [2, 1, 0]),
            (Goal::Harm(20.0), [0, 0, 0]),
            (Goal::Harm(13.5), [1, 0, 0]),
            // The first step is taken back, because the second suffices.
            (Goal::Harm(8.5), [0, 1, 0]),
            (Goal::Harm(4.5), [1, 1, 0]),
            (Goal::Harm(0.0), [2, 1, 0]),
        ];
        for (goal, expected) in cases {
            assert_eq!(greedy(&ladders, goal), expected, "{goal:?}");
        }
        assert!(greedy(&[], Goal::Cost(1.0)).is_empty());
    }
}

use super::{WeightBits, WeightError};
use crate::greedy::{Goal, Rung, greedy};
use std::collections::HashMap;

/// Bits of a row's scale.
const SCALE_BITS: f64 = 32.0;
/// Budgets are met as far as anybody writes them.
const TOLERANCE: f64 = 1.0001;

/// A matrix that can have 4 or 8 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Its name.
    pub name: String,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
    /// What its rounding to 4 and to 8 bits does to the model's output: for a budget of decibels the
    /// noise as a share of the signal, else whatever is to become small. The harm of different
    /// matrices is taken to add up.
    pub harm: [f64; 2],
}

/// What a plan has to keep to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Bits for each weight on average, the scales of the rows included, at most.
    Bits(f64),
    /// Signal to noise of the model's output in dB, at least.
    Decibels(f64),
}

/// The width of every matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct WidthPlan {
    /// By the name of the matrix.
    pub widths: HashMap<String, WeightBits>,
    /// Bits for each weight on average, the scales of the rows included.
    pub bits: f64,
    /// The harm of all together.
    pub harm: f64,
}

/// Raises those matrices to 8 bits in which a bit removes most of the harm, as far as `budget` goes.
///
/// # Errors
/// When 4 bits for all are more than the budget, or 8 bits for all do too much harm.
pub fn plan(choices: &[Choice], budget: Budget) -> Result<WidthPlan, WeightError> {
    let weights = |choice: &Choice| choice.rows as f64 * choice.columns as f64;
    let all: f64 = choices.iter().map(weights).sum::<f64>().max(1.0);
    let widths = [WeightBits::Four, WeightBits::Eight];
    let ladders: Vec<Vec<Rung>> = choices
        .iter()
        .map(|choice| {
            let rungs = widths.iter().zip(choice.harm).map(|(width, harm)| Rung {
                cost: weights(choice) * f64::from(width.count()) + choice.rows as f64 * SCALE_BITS,
                harm,
            });
            rungs.collect()
        })
        .collect();
    let goal = match budget {
        Budget::Bits(bits) => Goal::Cost(bits * all * TOLERANCE),
        Budget::Decibels(decibels) => Goal::Harm(10f64.powf(-decibels / 10.0)),
    };
    let at = greedy(&ladders, goal);
    let chosen = || ladders.iter().zip(&at).filter_map(|(rungs, at)| rungs.get(*at));
    let bits = chosen().map(|rung| rung.cost).sum::<f64>() / all;
    let harm: f64 = chosen().map(|rung| rung.harm).sum();
    let decibels = -10.0 * harm.log10();
    let (met, asked, extreme, reached) = match budget {
        Budget::Bits(asked) => {
            let name = format!("{asked} bits for each weight");
            (bits <= asked * TOLERANCE, name, "4 bits everywhere", bits)
        }
        Budget::Decibels(asked) => {
            let name = format!("{asked} dB");
            (decibels * TOLERANCE >= asked, name, "8 bits everywhere", decibels)
        }
    };
    if !met {
        return Err(WeightError::Budget { asked, extreme, reached });
    }
    let named = choices.iter().zip(at).map(|(choice, at)| (choice.name.clone(), widths[at.min(1)]));
    Ok(WidthPlan { widths: named.collect(), bits, harm })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices() -> Vec<Choice> {
        let choice = |name: &str, rows, harm| Choice { name: name.into(), rows, columns: 64, harm };
        vec![
            choice("a", 10, [1e-2, 1e-5]),
            choice("b", 10, [4e-2, 1e-5]),
            choice("c", 20, [4.5e-2, 1e-5]),
        ]
    }

    #[test]
    fn bits_and_decibels_are_kept() {
        let eight = |budget| {
            let plan = plan(&choices(), budget).unwrap();
            let of = plan.widths.iter().filter(|(_, width)| **width == WeightBits::Eight);
            let mut names: Vec<String> = of.map(|(name, _)| name.clone()).collect();
            names.sort();
            (names.join(" "), plan.bits)
        };
        // A scale is half a bit for each of 64 weights.
        let cases = [
            (Budget::Bits(4.5), "", 4.5),
            (Budget::Bits(5.6), "b", 5.5),
            (Budget::Bits(6.5), "a b", 6.5),
            (Budget::Bits(7.5), "b c", 7.5),
            (Budget::Bits(9.0), "a b c", 8.5),
            (Budget::Decibels(10.0), "", 4.5),
            (Budget::Decibels(12.0), "b", 5.5),
            (Budget::Decibels(19.9), "b c", 7.5),
            (Budget::Decibels(45.0), "a b c", 8.5),
        ];
        for (budget, names, bits) in cases {
            assert_eq!(eight(budget), (names.to_owned(), bits), "{budget:?}");
        }
    }

    #[test]
    fn budgets_that_cannot_be_met_say_what_can() {
        let error = |budget| plan(&choices(), budget).unwrap_err().to_string();
        assert_eq!(
            error(Budget::Bits(4.0)),
            "4 bits for each weight cannot be met: with 4 bits everywhere it is 4.500"
        );
        assert_eq!(
            error(Budget::Decibels(60.0)),
            "60 dB cannot be met: with 8 bits everywhere it is 45.229"
        );
        assert!(plan(&choices(), Budget::Bits(f64::NAN)).is_err());
        assert!(plan(&choices(), Budget::Decibels(f64::NAN)).is_err());
    }
}

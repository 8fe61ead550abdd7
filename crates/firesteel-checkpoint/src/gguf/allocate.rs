//! Which matrices get more bits, if only so many are to be had.

use super::write::{Buffers, Planned, SquareError, planned};
use crate::quantize::can_quantize;
use crate::{Checkpoint, CheckpointError, GgufOptions, WeightFormat};
use rayon::prelude::*;

/// Rows of a matrix that are quantized to learn its error, spread over it.
const SAMPLED_ROWS: usize = 256;

/// Formats that a matrix may be raised to, in order of their size: those with kernels.
const STEPS: [WeightFormat; 4] =
    [WeightFormat::Q4_0, WeightFormat::Q4K, WeightFormat::Q6K, WeightFormat::Q8_0];

/// A matrix that gets a larger format than the options say.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Raised {
    /// Name of the weight.
    pub name: String,
    /// Format of the options.
    pub from: WeightFormat,
    /// Format that it gets.
    pub to: WeightFormat,
    /// The harm in the two formats.
    pub harm: [f64; 2],
}

/// What harm an error does, by the name of the weight: the factor of the expected squared error of
/// the product.
pub type Effects<'a> = &'a (dyn Fn(&str) -> Option<f64> + Sync);

/// Chooses larger formats for those matrices in which a byte removes most of the harm, until the
/// file has `bits` bits for each weight, all tensors counted. Matrices with a format of their own
/// in `options` keep it.
///
/// The harm of a matrix is the importance-weighted squared error of its rows times its effect;
/// without an effect it is the error as a share of the matrix. The errors of different matrices
/// are taken to add up.
///
/// # Errors
/// When a weight cannot be read or written in its format, or the formats of `options` alone need
/// more bits.
pub fn allocate(
    checkpoint: &Checkpoint,
    options: &GgufOptions<'_>,
    bits: f64,
    effects: Effects<'_>,
) -> Result<Vec<Raised>, CheckpointError> {
    let planned = planned(checkpoint, options)?;
    let elements: usize = planned.iter().map(|tensor| tensor.weight.element_count()).sum();
    let bytes: usize = planned.iter().map(|tensor| tensor.bytes).sum();
    let budget = bits * elements as f64 / 8.0;
    let least = 8.0 * bytes as f64 / elements.max(1) as f64;
    // Finer than anybody writes a number of bits.
    if budget.is_nan() || (bytes as f64) > budget * 1.0005 {
        return Err(CheckpointError::Budget { bits, least });
    }
    let own = |name: &str| options.formats.is_some_and(|of| of(name).is_some());
    let mut ladders = Vec::new();
    for tensor in planned.iter().filter(|tensor| tensor.format.is_quantized()) {
        if !own(tensor.weight.name()) {
            ladders.push(Ladder::new(tensor, options, effects)?);
        }
    }
    let mut left = budget - bytes as f64;
    loop {
        let affordable = ladders.iter_mut().filter_map(|ladder| {
            let (gain, cost) = ladder.next()?;
            (cost <= left).then_some((gain / cost, cost, ladder))
        });
        // The first of equals, so that the choice does not depend on anything else.
        let best = affordable.reduce(|best, other| if other.0 > best.0 { other } else { best });
        let Some((_, cost, ladder)) = best else { break };
        left -= cost;
        ladder.at += 1;
    }
    Ok(ladders.into_iter().filter_map(Ladder::raised).collect())
}

/// The formats of a matrix, and where it stands.
struct Ladder {
    name: String,
    /// Format, bytes and harm; the first is that of the options.
    rungs: Vec<(WeightFormat, f64, f64)>,
    at: usize,
}

impl Ladder {
    fn new(
        tensor: &Planned,
        options: &GgufOptions<'_>,
        effects: Effects<'_>,
    ) -> Result<Self, CheckpointError> {
        let weight = &tensor.weight;
        let effect = effects(weight.name()).filter(|effect| effect.is_finite());
        let harm = |tensor: &Planned| -> Result<f64, CheckpointError> {
            let error = sampled_error(tensor)?;
            Ok(match effect {
                Some(effect) => effect * tensor.mean_importance * error.weighted_lost,
                None if error.weighted_all > 0.0 => error.weighted_lost / error.weighted_all,
                None => 0.0,
            })
        };
        let mut rungs = vec![(tensor.format, tensor.bytes as f64, harm(tensor)?)];
        for format in STEPS {
            let fits = tensor.columns().is_multiple_of(format.block_elements());
            let larger = weight.element_count() / format.block_elements() * format.block_bytes();
            if fits && can_quantize(format) && larger > tensor.bytes {
                let planned = Planned::new(weight, format, options)?;
                rungs.push((format, planned.bytes as f64, harm(&planned)?));
            }
        }
        Ok(Self { name: weight.name().to_owned(), rungs, at: 0 })
    }

    /// What the next format gains and costs.
    fn next(&self) -> Option<(f64, f64)> {
        let (_, bytes, harm) = self.rungs.get(self.at)?;
        let (_, more, less) = self.rungs.get(self.at + 1)?;
        Some((harm - less, more - bytes))
    }

    fn raised(self) -> Option<Raised> {
        let (&(from, _, before), &(to, _, after)) =
            (self.rungs.first()?, self.rungs.get(self.at)?);
        (from != to).then_some(Raised { name: self.name, from, to, harm: [before, after] })
    }
}

/// The error of the whole matrix, from some of its rows.
fn sampled_error(tensor: &Planned) -> Result<SquareError, CheckpointError> {
    let columns = tensor.columns();
    let rows = tensor.weight.element_count() / columns;
    let count = rows.min(SAMPLED_ROWS);
    let errors: Vec<SquareError> = (0..count)
        .into_par_iter()
        .map_init(Buffers::default, |buffers, index| {
            // Below the number of rows, and spread over all of them.
            let row = (index as u128 * rows as u128 / count.max(1) as u128) as usize;
            tensor.convert(row * columns, columns, buffers)
        })
        .collect::<Result<_, _>>()?;
    let mut sum = SquareError::default();
    errors.into_iter().for_each(|error| sum.add(error));
    sum.weighted_lost *= rows as f64 / count.max(1) as f64;
    sum.weighted_all *= rows as f64 / count.max(1) as f64;
    Ok(sum)
}

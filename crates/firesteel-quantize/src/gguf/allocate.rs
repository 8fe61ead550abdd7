//! Greedy bit allocation over the block types: which matrices get more bits, if only so many are to
//! be had.

use super::blocks::can_quantize;
use super::{Buffers, GgufOptions, Planned, SquareError, planned};
use crate::QuantizeError;
use crate::greedy::{Goal, Rung, greedy};
use firesteel_checkpoint::{Checkpoint, Half, Head, SlotKind, WeightFormat};
use rayon::prelude::*;
use std::collections::HashMap;

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

/// Whether [`allocate`] knows a larger format than `format`.
pub fn can_raise(format: WeightFormat) -> bool {
    let larger = |than: WeightFormat, other: WeightFormat| {
        other.block_bytes() * than.block_elements() > than.block_bytes() * other.block_elements()
    };
    format.is_quantized() && STEPS.into_iter().any(|step| larger(format, step))
}

/// What harm an error does, by the name of the weight: the factor of the expected squared error of
/// the product.
pub type Effects<'a> = &'a (dyn Fn(&str) -> Option<f64> + Sync);

/// Chooses larger formats for those matrices in which a byte removes most of the harm, until the
/// file has `bits` bits for each weight, all tensors counted. Matrices with a format of their own
/// in `options` keep it.
///
/// The harm of a matrix is the importance-weighted squared error of its rows times its effect.
/// Without an effect it is the error as a share of the matrix, times the share that the matrix is
/// taken to have in the residual stream: that of block k is 1 / k, as if all blocks before it had
/// added as much, and that of the logits is 1. The harm of different matrices is taken to add up.
///
/// # Errors
/// When a weight cannot be read or written in its format, or the formats of `options` alone need
/// more bits.
pub fn allocate(
    checkpoint: &Checkpoint,
    options: &GgufOptions<'_>,
    bits: f64,
    effects: Effects<'_>,
) -> Result<Vec<Raised>, QuantizeError> {
    let planned = planned(checkpoint, options)?;
    let elements: usize = planned.iter().map(|tensor| tensor.weight().element_count()).sum();
    let bytes: usize = planned.iter().map(|tensor| tensor.bytes).sum();
    let budget = bits * elements as f64 / 8.0;
    let least = 8.0 * bytes as f64 / elements.max(1) as f64;
    // Finer than anybody writes a number of bits.
    if budget.is_nan() || (bytes as f64) > budget * 1.0005 {
        return Err(QuantizeError::Budget { bits, least });
    }
    let own = |name: &str| options.formats.is_some_and(|of| of(name).is_some());
    let mut ladders = Vec::new();
    let shares = shares(checkpoint);
    for tensor in planned.iter().filter(|tensor| tensor.entry.format.is_quantized()) {
        let name = tensor.weight().name();
        if !own(name) {
            let effect = effects(name).filter(|effect| effect.is_finite());
            let share = shares.get(name).copied().unwrap_or(1.0);
            ladders.push(Ladder::new(
                tensor,
                options,
                effect.map_or(Harm::Share(share), Harm::Effect),
            )?);
        }
    }
    let counted: f64 =
        ladders.iter().filter_map(|ladder| ladder.rungs.first()).map(|r| r.cost).sum();
    let rungs: Vec<Vec<Rung>> = ladders.iter().map(|ladder| ladder.rungs.clone()).collect();
    let at = greedy(&rungs, Goal::Cost(budget - (bytes as f64 - counted)));
    Ok(ladders.into_iter().zip(at).filter_map(|(ladder, at)| ladder.raised(at)).collect())
}

/// The share of each matrix in the residual stream, as far as it is known without a text.
fn shares(checkpoint: &Checkpoint) -> HashMap<&str, f64> {
    let mut shares = HashMap::new();
    let mut block = 0.0;
    for layer in checkpoint.layers() {
        for half in Half::ALL {
            block += 1.0;
            let of_half = layer
                .iter()
                .filter(|(spec, _)| spec.kind == SlotKind::Matrix && spec.slot.half() == half);
            shares.extend(of_half.map(|(_, weight)| (weight.name(), 1.0 / block)));
        }
    }
    // A table that is the head too does harm at both ends.
    if !matches!(checkpoint.head(), Head::Stored(_)) {
        shares.insert(checkpoint.head_weight().name(), 2.0);
    }
    shares
}

/// What the harm of an error is.
#[derive(Debug, Clone, Copy)]
enum Harm {
    /// This times the weighted squared error.
    Effect(f64),
    /// This times the error as a share of the matrix.
    Share(f64),
}

impl Harm {
    fn of(self, tensor: &Planned) -> Result<f64, QuantizeError> {
        let error = sampled_error(tensor)?;
        Ok(match self {
            Self::Effect(effect) => effect * tensor.mean_importance * error.weighted_lost,
            Self::Share(share) if error.weighted_all > 0.0 => {
                share * error.weighted_lost / error.weighted_all
            }
            Self::Share(_) => 0.0,
        })
    }
}

/// The formats that a matrix can have; the first is that of the options.
struct Ladder {
    name: String,
    formats: Vec<WeightFormat>,
    /// What they cost in bytes.
    rungs: Vec<Rung>,
}

impl Ladder {
    fn new(tensor: &Planned, options: &GgufOptions<'_>, harm: Harm) -> Result<Self, QuantizeError> {
        let weight = tensor.weight();
        let rung = |tensor: &Planned| -> Result<Rung, QuantizeError> {
            Ok(Rung { cost: tensor.bytes as f64, harm: harm.of(tensor)? })
        };
        let (mut formats, mut rungs) = (vec![tensor.entry.format], vec![rung(tensor)?]);
        for format in STEPS {
            let fits = tensor.entry.columns().is_multiple_of(format.block_elements());
            if fits && can_quantize(format) {
                let planned = Planned::new(weight, format, options)?;
                if planned.bytes > tensor.bytes {
                    formats.push(format);
                    rungs.push(rung(&planned)?);
                }
            }
        }
        Ok(Self { name: weight.name().to_owned(), formats, rungs })
    }

    fn raised(self, at: usize) -> Option<Raised> {
        let (from, to) = (*self.formats.first()?, *self.formats.get(at)?);
        let harm = [self.rungs.first()?.harm, self.rungs.get(at)?.harm];
        let raised = Raised { name: self.name, from, to, harm };
        (at > 0).then_some(raised)
    }
}

/// The error of the whole matrix, from some of its rows.
fn sampled_error(tensor: &Planned) -> Result<SquareError, QuantizeError> {
    let columns = tensor.entry.columns();
    let rows = tensor.weight().element_count() / columns;
    let count = rows.min(SAMPLED_ROWS);
    let errors: Vec<SquareError> = (0..count)
        .into_par_iter()
        .map_init(<(Buffers, Vec<u8>)>::default, |(buffers, out), index| {
            // Below the number of rows, and spread over all of them.
            let row = (index as u128 * rows as u128 / count.max(1) as u128) as usize;
            let bytes = tensor.entry.format.byte_count(columns).unwrap_or_default();
            out.resize(bytes, 0);
            tensor.convert(row * columns, columns, buffers, out)
        })
        .collect::<Result<_, _>>()?;
    let mut sum = SquareError::default();
    errors.into_iter().for_each(|error| sum.add(error));
    sum.weighted_lost *= rows as f64 / count.max(1) as f64;
    sum.weighted_all *= rows as f64 / count.max(1) as f64;
    Ok(sum)
}

use crate::estimate::{StepChoice, StepCost};
use crate::traffic::Cost;
use crate::{LayerShape, Measurement, Origin, PartKind, ProfileError, Table};
use firesteel_checkpoint::{LayerKind, ModelConfig, Rope};
use firesteel_export::Gelu;
use firesteel_step::{CacheLayout, CacheLayoutChoice};
use serde::Serialize;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

/// Which rows of a table a device's speed is fitted on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FitSelection {
    /// Runtime and unit.
    pub runtime: String,
    /// Number format.
    pub precision: String,
    /// Spelling of the graph; `None` for all that the table has.
    pub dialect: Option<String>,
}

/// What a time is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// Bytes that cross the memory, by its bandwidth. Always part of a fit.
    Memory,
    /// Bytes that operators move, by the bandwidth of moving.
    Moved,
    /// Operations, by the rate of computing.
    Operations,
    /// A time that each part takes, whatever is in it.
    Overhead,
}

impl Term {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Moved, Self::Operations, Self::Overhead];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Moved => "moved",
            Self::Operations => "operations",
            Self::Overhead => "overhead",
        }
    }

    /// What a second of the term is: 10^9 bytes or operations; for the overhead ms.
    pub const fn unit(self) -> &'static str {
        match self {
            Self::Memory | Self::Moved => "GB/s",
            Self::Operations => "Gop/s",
            Self::Overhead => "ms a part",
        }
    }

    /// How much of the term a part has, in 10^6 bytes or operations, so that the coefficient is
    /// in ms for each.
    fn amount(self, cost: &Cost, parts: f64) -> f64 {
        let count = match self {
            Self::Memory => cost.memory_bytes(),
            Self::Moved => cost.moved_bytes,
            Self::Operations => cost.operations,
            Self::Overhead => return parts,
        };
        count as f64 / 1e6
    }
}

/// What a fit says of one term.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TermFit {
    /// The term.
    pub term: Term,
    /// Bandwidth in GB/s (10^9 bytes), rate in 10^9 operations a second, or ms a part; `None` for
    /// a term that is not part of the fit.
    pub value: Option<f64>,
    /// Unit of the value.
    pub unit: &'static str,
    /// Why it is not part of the fit.
    pub left_out: Option<&'static str>,
}

/// A measured row beside its fitted time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FittedRow {
    /// What was measured.
    pub kind: PartKind,
    /// Its cache layout.
    pub layout: Option<CacheLayout>,
    /// Its context.
    pub context: Option<usize>,
    /// The measured time in ms.
    pub measured_ms: f64,
    /// The fitted one in ms.
    pub fitted_ms: f64,
    /// (fitted − measured) / measured, in percent.
    pub error_percent: f64,
    /// The same when this row is left out of the fit; `None` when the others do not suffice.
    pub left_out_percent: Option<f64>,
    /// How far the measured time can be traced.
    pub origin: Origin,
    /// What the row costs by the count.
    pub cost: Cost,
}

/// A device's speed: ms = bytes / bandwidth + moved / bandwidth + operations / rate + overhead,
/// with the terms that the rows can carry. Everything that follows from it is an estimate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fit {
    /// The device of the table.
    pub device: String,
    /// Its system on a chip.
    pub soc: String,
    /// Which rows.
    pub selection: FitSelection,
    /// Whether the rows are of builds that compute something else than the layers, so that nothing
    /// but their times is right.
    pub timing_only: bool,
    /// The terms.
    pub terms: Vec<TermFit>,
    /// The rows.
    pub rows: Vec<FittedRow>,
    /// Largest error of a row in percent, without sign.
    pub max_percent: f64,
    /// Root mean square of the errors in percent; `None` when there are no more rows than terms,
    /// because the errors are 0 then whatever the rows are.
    pub rms_percent: Option<f64>,
    /// Root mean square of the errors of rows that were left out of the fit; `None` when one cannot
    /// be left out.
    pub left_out_rms_percent: Option<f64>,
    #[serde(skip)]
    coefficients: [f64; TERMS],
}

const TERMS: usize = Term::ALL.len();

/// Times of single layers on a device in one precision as a linear function of what they cost.
///
/// Rows of builds that compute the layers are taken where there are two of them or more, else those
/// of 'timing only' builds, never both; variants, blocks and steps of several tokens are left out.
/// The costs are counted on graphs of the table's shape, so `config` may be a model of another; its
/// other properties (pattern, rotary base) are assumed. Relative errors are what is made small. Of
/// all sets of terms that have a positive coefficient each and leave a row over, the one is taken
/// that predicts rows best which are left out.
///
/// # Errors
/// When the table has no such rows.
pub fn fit(
    config: &ModelConfig,
    table: &Table,
    selection: &FitSelection,
) -> Result<Fit, ProfileError> {
    let (rows, timing_only) = select(table, selection)?;
    let shape = config_of(config, &table.model)?;
    let mut samples = Vec::with_capacity(rows.len());
    let mut known = HashMap::new();
    for row in &rows {
        let cost = match known.entry((row.kind, row.layout, row.context)) {
            Entry::Occupied(cost) => *cost.get(),
            Entry::Vacant(place) => *place.insert(cost_of(&shape, row)?),
        };
        samples.push((*row, cost));
    }
    let equations: Vec<Equation> = samples
        .iter()
        .map(|(row, cost)| Equation {
            // Divided by the time, so that errors are relative.
            amounts: Term::ALL.map(|term| term.amount(cost, 1.0) / row.ms),
        })
        .collect();
    let best = choose(&equations);
    let coefficients = best.coefficients;
    let left_out_rows: Vec<Option<f64>> =
        (0..equations.len()).map(|row| left_out(&equations, best.set, row)).collect();
    let origin = |row: &Measurement| {
        let source = table.sources.iter().find(|source| source.id == row.source);
        source.map_or(Origin::Imported, |source| source.origin)
    };
    let fitted: Vec<FittedRow> = samples
        .iter()
        .zip(&equations)
        .zip(&left_out_rows)
        .map(|(((row, cost), equation), left_out)| {
            let relative = equation.value(&coefficients);
            FittedRow {
                kind: row.kind,
                layout: row.layout,
                context: row.context,
                measured_ms: row.ms,
                fitted_ms: relative * row.ms,
                error_percent: 100.0 * (relative - 1.0),
                left_out_percent: left_out.map(|error| 100.0 * error),
                origin: origin(row),
                cost: *cost,
            }
        })
        .collect();
    let rms = |errors: &[f64]| {
        (errors.iter().map(|error| error * error).sum::<f64>() / errors.len().max(1) as f64).sqrt()
    };
    let errors: Vec<f64> = fitted.iter().map(|row| row.error_percent).collect();
    let left: Option<Vec<f64>> = fitted.iter().map(|row| row.left_out_percent).collect();
    let free = equations.len() > best.set.count_ones() as usize;
    Ok(Fit {
        device: table.device.clone(),
        soc: table.soc.clone(),
        selection: selection.clone(),
        timing_only,
        terms: terms(&equations, &best),
        max_percent: errors.iter().fold(0.0, |max, error| f64::max(max, error.abs())),
        rms_percent: free.then(|| rms(&errors)),
        left_out_rms_percent: left.map(|errors| rms(&errors)),
        rows: fitted,
        coefficients,
    })
}

impl Fit {
    /// The estimated time in ms of `parts` parts that cost `cost` together.
    pub fn ms(&self, cost: &Cost, parts: f64) -> f64 {
        let terms = Term::ALL.iter().zip(self.coefficients);
        terms.map(|(term, coefficient)| coefficient * term.amount(cost, parts)).sum()
    }

    /// As [`ms`](Self::ms), with other bytes that cross the memory.
    pub fn ms_with_memory(&self, cost: &Cost, memory_bytes: u64, parts: f64) -> f64 {
        let cost = Cost {
            weight_bytes: memory_bytes,
            cache_read_bytes: 0,
            cache_written_bytes: 0,
            border_bytes: 0,
            ..*cost
        };
        self.ms(&cost, parts)
    }

    /// In what a part lies outside of the rows, among the terms of the fit.
    pub fn beyond(&self, cost: &Cost) -> Vec<String> {
        let mut found = Vec::new();
        for (term, coefficient) in Term::ALL.into_iter().zip(self.coefficients) {
            if coefficient == 0.0 || term == Term::Overhead {
                continue;
            }
            let own = term.amount(cost, 1.0);
            let amounts = || self.rows.iter().map(|row| term.amount(&row.cost, 1.0));
            let (low, high) =
                (amounts().fold(f64::INFINITY, f64::min), amounts().fold(0.0, f64::max));
            // A part that is a few percent off is no other part.
            if own > 1.05 * high {
                found.push(format!("{} {:.2} × the largest row", term.name(), own / high));
            } else if own < low / 1.05 {
                found.push(format!("{} {:.2} × the smallest row", term.name(), own / low));
            }
        }
        found
    }
}

/// The rows to fit, and whether only their times are right.
fn select<'a>(
    table: &'a Table,
    selection: &FitSelection,
) -> Result<(Vec<&'a Measurement>, bool), ProfileError> {
    let plain = |row: &&Measurement| {
        row.tokens == 1 && row.variant.is_none() && row.kind != PartKind::Block
    };
    let rows: Vec<&Measurement> = table.measurements.iter().filter(plain).collect();
    let refuse = |what, value: &str, known: BTreeSet<&str>| ProfileError::Choice {
        what,
        value: format!("{value}, of which the table of {} has no row to fit", table.device),
        accepted: known.into_iter().collect::<Vec<_>>().join(", "),
    };
    let of_runtime: Vec<_> =
        rows.iter().copied().filter(|row| row.runtime == selection.runtime).collect();
    if of_runtime.is_empty() {
        let known = rows.iter().map(|row| row.runtime.as_str()).collect();
        return Err(refuse("runtime", &selection.runtime, known));
    }
    let of_precision: Vec<_> =
        of_runtime.iter().copied().filter(|row| row.precision == selection.precision).collect();
    if of_precision.is_empty() {
        let known = of_runtime.iter().map(|row| row.precision.as_str()).collect();
        return Err(refuse("precision", &selection.precision, known));
    }
    let of_dialect: Vec<_> = of_precision
        .iter()
        .copied()
        .filter(|row| selection.dialect.is_none() || row.dialect == selection.dialect)
        .collect();
    if of_dialect.is_empty() {
        let names = of_precision.iter().map(|row| row.dialect.as_deref().unwrap_or("none named"));
        let dialect = selection.dialect.as_deref().unwrap_or_default();
        return Err(refuse("dialect", dialect, names.collect()));
    }
    let (timing_only, right): (Vec<&Measurement>, Vec<&Measurement>) =
        of_dialect.into_iter().partition(|row| row.timing_only);
    let only = right.len() < 2 && timing_only.len() > right.len();
    Ok(if only { (timing_only, true) } else { (right, false) })
}

/// A model of the table's shape: one layer of each kind that was measured.
fn config_of(config: &ModelConfig, shape: &LayerShape) -> Result<ModelConfig, ProfileError> {
    let rope = |dims: Option<usize>, theta: f64| dims.map(|dims| Rope::plain(theta, dims));
    let sliding = shape.sliding_window.filter(|_| shape.rotary_dims_sliding.is_some());
    let kinds = [
        (LayerKind::Sliding, sliding.is_some()),
        (LayerKind::Full, shape.rotary_dims_full.is_some()),
    ];
    let layer_types: Vec<LayerKind> =
        kinds.into_iter().filter(|(_, has)| *has).map(|(kind, _)| kind).collect();
    let model = ModelConfig {
        family: shape.family,
        hidden_size: shape.hidden_size,
        intermediate_size: shape.intermediate_size,
        num_attention_heads: shape.num_attention_heads,
        num_key_value_heads: shape.num_key_value_heads,
        head_dim: shape.head_dim,
        vocab_size: shape.vocab_size,
        sliding_window: sliding,
        rope_sliding: rope(shape.rotary_dims_sliding.filter(|_| sliding.is_some()), 1e4),
        rope_full: rope(shape.rotary_dims_full, 1e6),
        layer_types,
        ..config.clone()
    };
    // A table is a stranger's file: its shape has to be one that a model can have.
    let text = model.to_json();
    let (model, _) = ModelConfig::from_json("the table's model".as_ref(), text.as_bytes())?;
    Ok(model)
}

/// What a measured row costs by the count.
fn cost_of(shape: &ModelConfig, row: &Measurement) -> Result<Cost, ProfileError> {
    let choice = StepChoice {
        context: row.context.or(shape.sliding_window).unwrap_or(1),
        layout: match row.layout {
            Some(CacheLayout::Roll) => CacheLayoutChoice::Roll,
            Some(CacheLayout::Ring) => CacheLayoutChoice::Ring,
            None => CacheLayoutChoice::Auto,
        },
        precision: row.precision.clone(),
        kv: None,
        gelu: Gelu::Exact,
        head_shards: 1,
    };
    let cost = StepCost::of_choice(shape, &choice)?;
    let part = cost.parts.iter().find(|part| part.kind == row.kind);
    part.map(|part| part.cost).ok_or_else(|| ProfileError::Choice {
        what: "the table's model",
        value: format!("one without {}", row.kind),
        accepted: "the window and the rotary dimensions of every kind of layer that was measured"
            .into(),
    })
}

/// A row, divided by its time: the sum of amounts × coefficients is to be 1.
struct Equation {
    amounts: [f64; TERMS],
}

impl Equation {
    fn value(&self, coefficients: &[f64; TERMS]) -> f64 {
        self.amounts.iter().zip(coefficients).map(|(amount, one)| amount * one).sum()
    }
}

/// A set of terms, a bit each, and the coefficients of all.
struct Candidate {
    set: u8,
    coefficients: [f64; TERMS],
}

const MEMORY: u8 = 1;

/// The best set of terms: the least error of rows that were left out, and of equally good ones that
/// with the fewest terms.
fn choose(equations: &[Equation]) -> Candidate {
    let mut best: Option<(f64, u32, Candidate)> = None;
    for set in (1..1u8 << TERMS).filter(|set| set & MEMORY != 0) {
        let size = set.count_ones();
        if size > 1 && size as usize >= equations.len() {
            continue;
        }
        let Some(coefficients) = positive(equations, set) else { continue };
        let errors: Option<Vec<f64>> =
            (0..equations.len()).map(|row| left_out(equations, set, row)).collect();
        // A single row leaves nothing to compare.
        let error = errors
            .map_or(f64::INFINITY, |errors| errors.iter().map(|error| error * error).sum::<f64>());
        let better = best.as_ref().is_none_or(|(known, terms, _)| {
            error < known * (1.0 - 1e-9) || (error <= known * (1.0 + 1e-9) && size < *terms)
        });
        if better {
            best = Some((error, size, Candidate { set, coefficients }));
        }
    }
    // The bytes of one row by its time are always a bandwidth.
    best.map_or(Candidate { set: 0, coefficients: [0.0; TERMS] }, |(_, _, candidate)| candidate)
}

/// The coefficients of a set, if the rows determine them and each is positive.
fn positive(equations: &[Equation], set: u8) -> Option<[f64; TERMS]> {
    let coefficients = Normal::of(equations).solve(set)?;
    let all = (0..TERMS).all(|term| set & (1 << term) == 0 || coefficients[term] > 0.0);
    all.then_some(coefficients)
}

/// The relative error of a row by the fit of all others.
fn left_out(equations: &[Equation], set: u8, row: usize) -> Option<f64> {
    let own = equations.get(row)?;
    if equations.len() <= set.count_ones() as usize {
        return None;
    }
    let mut normal = Normal::of(equations);
    normal.add(own, -1.0);
    Some(own.value(&normal.solve(set)?) - 1.0)
}

/// What each term became.
fn terms(equations: &[Equation], best: &Candidate) -> Vec<TermFit> {
    Term::ALL
        .into_iter()
        .enumerate()
        .map(|(index, term)| {
            let bit = 1u8 << index;
            let coefficient = best.coefficients[index];
            let (value, left_out) = if best.set & bit != 0 {
                let value = if term == Term::Overhead { coefficient } else { 1.0 / coefficient };
                (Some(value), None)
            } else {
                let with = best.set | bit;
                let reason = if with.count_ones() as usize >= equations.len() {
                    "too few rows"
                } else if Normal::of(equations).solve(with).is_none() {
                    "the rows do not tell it from the others"
                } else if positive(equations, with).is_none() {
                    "a coefficient would be negative"
                } else {
                    "rows that are left out are predicted worse with it"
                };
                (None, Some(reason))
            };
            TermFit { term, value, unit: term.unit(), left_out }
        })
        .collect()
}

/// The normal equations of a least-squares problem.
#[derive(Clone)]
struct Normal {
    matrix: [[f64; TERMS]; TERMS],
    right: [f64; TERMS],
}

/// Below this share of its diagonal a pivot says that two terms are the same in all rows.
const SINGULAR: f64 = 1e-9;

impl Normal {
    fn of(equations: &[Equation]) -> Self {
        let mut normal = Self { matrix: [[0.0; TERMS]; TERMS], right: [0.0; TERMS] };
        for equation in equations {
            normal.add(equation, 1.0);
        }
        normal
    }

    fn add(&mut self, equation: &Equation, times: f64) {
        for (row, a) in equation.amounts.iter().enumerate() {
            for (column, b) in equation.amounts.iter().enumerate() {
                self.matrix[row][column] += times * a * b;
            }
            self.right[row] += times * a;
        }
    }

    /// The coefficients of the terms of `set` by Gaussian elimination, the others 0; `None` when
    /// the rows do not determine them.
    fn solve(&self, set: u8) -> Option<[f64; TERMS]> {
        let terms: Vec<usize> = (0..TERMS).filter(|term| set & (1 << term) != 0).collect();
        let (mut matrix, mut right) = (self.matrix, self.right);
        // Scaled to a diagonal of ones, so that pivots can be compared with 1.
        let scale = terms.iter().map(|&term| self.matrix[term][term].sqrt()).collect::<Vec<f64>>();
        if scale.iter().any(|scale| scale.is_nan() || *scale <= 0.0) {
            return None;
        }
        for (&i, si) in terms.iter().zip(&scale) {
            for (&j, sj) in terms.iter().zip(&scale) {
                matrix[i][j] /= si * sj;
            }
            right[i] /= si;
        }
        for (done, &pivot) in terms.iter().enumerate() {
            if matrix[pivot][pivot] < SINGULAR {
                return None;
            }
            for &row in &terms[done + 1..] {
                let factor = matrix[row][pivot] / matrix[pivot][pivot];
                for &column in &terms[done..] {
                    matrix[row][column] -= factor * matrix[pivot][column];
                }
                right[row] -= factor * right[pivot];
            }
        }
        let mut solved = [0.0; TERMS];
        for (done, &row) in terms.iter().enumerate().rev() {
            let known: f64 =
                terms[done + 1..].iter().map(|&column| matrix[row][column] * solved[column]).sum();
            solved[row] = (right[row] - known) / matrix[row][row];
        }
        for (&term, scale) in terms.iter().zip(&scale) {
            solved[term] /= scale;
        }
        solved.iter().all(|value| value.is_finite()).then_some(solved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of known coefficients come back, and terms that no row has are left out.
    #[test]
    fn coefficients_are_found() {
        let cases: [([f64; TERMS], u8); 4] = [
            ([0.01, 0.0, 0.0, 0.0], 0b0001),
            ([0.01, 0.05, 0.0, 0.0], 0b0011),
            ([0.02, 0.0, 0.0, 0.3], 0b1001),
            ([0.02, 0.03, 0.0, 0.1], 0b1011),
        ];
        let amounts = [
            [50.0, 4.0, 100.0, 1.0],
            [55.0, 9.0, 130.0, 1.0],
            [60.0, 30.0, 90.0, 1.0],
            [270.0, 0.1, 500.0, 1.0],
            [80.0, 50.0, 210.0, 1.0],
            [20.0, 1.0, 33.0, 1.0],
        ];
        for (coefficients, set) in cases {
            let equations: Vec<Equation> = amounts
                .iter()
                .map(|amounts| {
                    let ms = Equation { amounts: *amounts }.value(&coefficients);
                    Equation { amounts: amounts.map(|amount| amount / ms) }
                })
                .collect();
            let best = choose(&equations);
            assert_eq!(best.set & set, set, "{coefficients:?} {:#b}", best.set);
            for (found, known) in best.coefficients.iter().zip(coefficients) {
                assert!((found - known).abs() < 1e-6, "{coefficients:?} {:?}", best.coefficients);
            }
        }
    }

    #[test]
    fn few_rows_carry_few_terms() {
        let rows = |count: usize| -> Vec<Equation> {
            [[50.0, 4.0, 100.0, 1.0], [60.0, 30.0, 90.0, 1.0], [270.0, 0.1, 500.0, 1.0]][..count]
                .iter()
                .zip([0.8, 1.2, 3.9])
                .map(|(amounts, ms)| Equation { amounts: amounts.map(|amount| amount / ms) })
                .collect()
        };
        assert_eq!(choose(&rows(1)).set, MEMORY);
        assert_eq!(choose(&rows(2)).set, MEMORY);
        assert!(choose(&rows(3)).set.count_ones() <= 2);
        // Two equal rows tell nothing apart.
        let same: Vec<Equation> = (0..5).map(|_| rows(1).remove(0)).collect();
        let best = choose(&same);
        assert_eq!(best.set, MEMORY);
        let reasons: Vec<_> = terms(&same, &best).into_iter().map(|term| term.left_out).collect();
        let reason = Some("the rows do not tell it from the others");
        assert_eq!(reasons, [None, reason, reason, reason]);
    }
}

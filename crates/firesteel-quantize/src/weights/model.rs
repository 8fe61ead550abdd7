use super::follow::{LayerOptions, Texts, round};
use super::texts::{logits, spread_over, token_weights};
use super::{
    Budget, Choice, Gram, OutputError, QuantizedMatrix, ScoreRows, WeightBits, WeightError,
    WidthPlan, plan, round_for_output, round_nearest,
};
use firesteel_checkpoint::{Checkpoint, LayerWeights, Weight};
use firesteel_engine::Calibration;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Most tokens that all matrices are rounded to 4 bits for to see which of them get 8 of a budget of
/// bits.
const FIRST: usize = 8192;

/// How the weights of a model are quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelOptions<'a> {
    /// Which matrices get 8 bits.
    pub widths: Widths,
    /// Texts over which it is measured what each matrix costs the output, for mixed widths: the model
    /// reads them once for each matrix, and is in memory as f32. Weights are not rounded for them as
    /// long as something is measured, because the errors would be smaller there, and for a budget of
    /// bits for no more than 8192 tokens of the others until then. Without them the costs are
    /// estimated from the error of the matrix's output, which is quick, but does not know how an error
    /// spreads.
    pub measured: &'a [&'a [u32]],
    /// Whether each matrix is rounded for what the matrices before it have become, and makes up for
    /// a part of their errors. The texts are read six times as often.
    pub follow: bool,
}

/// Which matrices get 8 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Widths {
    /// All have the same width.
    Same(WeightBits),
    /// Those that do most harm.
    Mixed(Budget),
}

/// A model's matrices as integers.
#[derive(Debug, Clone)]
pub struct QuantizedModel {
    /// The model in floats whose matrices they are: it computes what the original one does, but
    /// its weights are not the same.
    pub model: Arc<Checkpoint>,
    /// By the names in `model`: the matrices of all layers but the small ones, and the head.
    pub matrices: BTreeMap<String, QuantizedMatrix>,
    /// Their widths.
    pub plan: WidthPlan,
    /// Signal to noise of the logits in dB that mixed widths were expected to have, where their
    /// noise is what they were chosen by.
    pub expected: Option<f64>,
    /// The one that they have, over the texts of [`ModelOptions::measured`], for a budget of decibels.
    pub measured: Option<f64>,
}

impl QuantizedModel {
    /// The model with the values of the integers in f32. The embedding and small matrices keep
    /// theirs.
    ///
    /// # Errors
    /// When the matrices are not those of the model.
    pub fn widened(&self) -> Result<Checkpoint, WeightError> {
        widened(&self.model, &self.matrices)
    }
}

fn widened(
    model: &Checkpoint,
    matrices: &BTreeMap<String, QuantizedMatrix>,
) -> Result<Checkpoint, WeightError> {
    let mut weights = Vec::with_capacity(matrices.len());
    for (name, matrix) in matrices {
        weights.push(widened_matrix(name, matrix)?);
    }
    Ok(model.with_weights(weights)?)
}

fn widened_matrix(name: &str, matrix: &QuantizedMatrix) -> Result<Weight, WeightError> {
    Ok(Weight::from_f32(name, vec![matrix.rows, matrix.columns], matrix.values())?)
}

/// Quantizes the matrices of `model` for what they meet while it reads `texts`
/// ([`round_layers`](super::round_layers)), with the widths that follow from the harm that the errors
/// of the matrices do ([`plan`]): the noise of the logits, and for a budget of bits the KL divergence of
/// the probabilities too. A budget of decibels is measured with all widths together, and
/// more matrices are raised until it holds. Columns that are equally large come out best, see
/// [`with_columns`](super::with_columns). The result is the same on any number of threads. `progress`
/// is told the name of each matrix that is done.
///
/// # Errors
/// When the texts cannot be run, a weight is not finite, or the budget cannot be met.
pub fn quantize_model(
    model: &Arc<Checkpoint>,
    texts: &[&[u32]],
    options: &ModelOptions<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<QuantizedModel, WeightError> {
    let measured = options.measured.iter().any(|text| !text.is_empty());
    // Shares of the harm hardly depend on how much text there is. Decibels do.
    let first_texts = match (options.widths, measured && options.follow) {
        (Widths::Mixed(Budget::Bits(_)), true) => spread_over(texts, FIRST),
        _ => texts.to_vec(),
    };
    let weights = token_weights(model, &first_texts)?;
    let first_texts = Texts { texts: &first_texts, weights: Some(&weights) };
    let layers =
        LayerOptions { layers: 0..model.layers().len(), head: true, follow: options.follow };
    let first = match options.widths {
        Widths::Same(bits) => bits,
        Widths::Mixed(_) => WeightBits::Four,
    };
    let estimated = !measured && options.widths != Widths::Same(first);
    let effects = match estimated {
        true => Calibration::run(model, texts, &mut |_| {})?.effects(model),
        false => HashMap::new(),
    };
    let mut choices = Vec::new();
    let mut done = |weight: &Weight, matrix: &QuantizedMatrix, gram: &Gram, error: &OutputError| {
        progress(weight.name());
        let mut choice = choice(weight)?;
        if estimated {
            let effect = effects.get(weight.name()).copied().unwrap_or(1.0);
            let by_rows = ScoreRows::of(model, weight.name()).is_some();
            let matrix = (!by_rows).then_some(matrix);
            choice.harm = estimate(weight, matrix, gram, error)?.map(|square| effect * square);
        }
        choices.push(choice);
        Ok(())
    };
    let matrices = round(model, first_texts, &layers, &|_| Some(first), &mut done)?;
    let budget = match options.widths {
        Widths::Mixed(budget) => budget,
        Widths::Same(bits) => {
            let budget = match bits {
                WeightBits::Four => Budget::Decibels(f64::NEG_INFINITY),
                WeightBits::Eight => Budget::Bits(f64::INFINITY),
            };
            let (model, plan) = (Arc::clone(model), plan(&choices, budget)?);
            return Ok(QuantizedModel { model, matrices, plan, expected: None, measured: None });
        }
    };
    let reference = match estimated {
        true => None,
        false => Some(Reference::of(model, options.measured)?),
    };
    if let Some(reference) = &reference {
        reference.share(&matrices, budget, &mut choices)?;
    }
    let mut found = plan(&choices, budget)?;
    let (texts, to_measure) = match (budget, &reference) {
        (Budget::Decibels(asked), Some(reference)) => (texts.to_vec(), Some((asked, reference))),
        // Nothing more is measured.
        _ => ([texts, options.measured].concat(), None),
    };
    let weights = match texts == first_texts.texts {
        true => weights.clone(),
        false => token_weights(model, &texts)?,
    };
    let texts = Texts { texts: &texts, weights: Some(&weights) };
    loop {
        let raised = |name: &str| found.widths.get(name) == Some(&WeightBits::Eight);
        let width = |name: &str| match raised(name) {
            true => Some(WeightBits::Eight),
            // By itself it is what it was.
            false => options.follow.then_some(WeightBits::Four),
        };
        let mut done = |weight: &Weight, _: &QuantizedMatrix, _: &Gram, _: &OutputError| {
            progress(weight.name());
            Ok(())
        };
        let mut matrices = matrices.clone();
        matrices.extend(round(model, texts, &layers, &width, &mut done)?);
        let noise = matches!(budget, Budget::Decibels(_)) || estimated;
        let expected = noise.then(|| decibels(found.harm));
        let mut result = QuantizedModel {
            model: Arc::clone(model),
            matrices,
            plan: found,
            expected,
            measured: None,
        };
        let Some((asked, reference)) = to_measure else { return Ok(result) };
        let reached = decibels(reference.harm(&result.widened()?)?.noise);
        result.measured = Some(reached);
        if reached >= asked {
            return Ok(result);
        }
        if result.plan.widths.values().all(|bits| *bits == WeightBits::Eight) {
            let extreme = "8 bits everywhere";
            return Err(WeightError::Budget { asked: format!("{asked} dB"), extreme, reached });
        }
        // Noises that are measured one by one add up only nearly.
        let goal = decibels(result.plan.harm).max(asked) + (asked - reached).max(0.1);
        found = match plan(&choices, Budget::Decibels(goal)) {
            Ok(more) if more.bits > result.plan.bits => more,
            _ => plan(&choices, Budget::Bits(f64::INFINITY))?,
        };
    }
}

/// A share of noise as signal to noise in dB.
fn decibels(noise: f64) -> f64 {
    -10.0 * noise.log10()
}

/// A matrix that has 4 or 8 bits, with the squared errors of its weights as the harm.
fn choice(weight: &Weight) -> Result<Choice, WeightError> {
    let (rows, columns, values) = read(weight)?;
    let square = |bits| -> Result<f64, WeightError> {
        let rounded = round_nearest(&values, rows, columns, bits)?.values();
        Ok(values.iter().zip(rounded).map(|(a, b)| f64::from(a - b).powi(2)).sum())
    };
    let harm = [square(WeightBits::Four)?, square(WeightBits::Eight)?];
    Ok(Choice { name: weight.name().to_owned(), rows, columns, harm })
}

/// Mean squared errors of the outputs of a matrix of 4 and of 8 bits. Queries and keys, which are not
/// given in 4 bits, are rounded by rows: scores that are near leave outputs that are not so near.
fn estimate(
    weight: &Weight,
    four: Option<&QuantizedMatrix>,
    gram: &Gram,
    error: &OutputError,
) -> Result<[f64; 2], WeightError> {
    let (rows, columns, values) = read(weight)?;
    let noise = |matrix: &QuantizedMatrix| {
        let error: Vec<f32> = values.iter().zip(matrix.values()).map(|(a, b)| a - b).collect();
        let square = gram.output_square(&error).unwrap_or(f64::INFINITY);
        square / gram.rows().max(1) as f64
    };
    let four = match four {
        Some(four) => noise(four),
        None => noise(&round_for_output(&values, rows, columns, WeightBits::Four, error)?),
    };
    Ok([four, noise(&round_nearest(&values, rows, columns, WeightBits::Eight)?)])
}

/// The logits of a model over some texts, against which others are held.
struct Reference<'a> {
    model: Checkpoint,
    texts: &'a [&'a [u32]],
    logits: Vec<f32>,
}

impl<'a> Reference<'a> {
    fn of(model: &Checkpoint, texts: &'a [&'a [u32]]) -> Result<Self, WeightError> {
        let mut floats = Vec::new();
        for weight in rounded(model) {
            let (_, _, values) = read(weight)?;
            floats.push(Weight::from_f32(weight.name(), weight.shape().to_vec(), values)?);
        }
        let model = model.with_weights(floats)?;
        let mut all = Vec::new();
        logits(&model, texts, &mut |logits| all.extend_from_slice(logits))?;
        Ok(Self { model, texts, logits: all })
    }

    /// What the errors of the logits of `test` are.
    fn harm(&self, test: &Checkpoint) -> Result<Harm, WeightError> {
        let mut own = self.logits.chunks(self.model.config().vocab_size.max(1));
        let (mut signal, mut noise, mut divergence) = (0.0, 0.0, 0.0);
        logits(test, self.texts, &mut |test| {
            let own = own.next().unwrap_or_default();
            for (own, test) in own.iter().zip(test) {
                signal += f64::from(*own).powi(2);
                noise += (f64::from(*own) - f64::from(*test)).powi(2);
            }
            let logarithms = log_probabilities(own).into_iter().zip(log_probabilities(test));
            divergence += logarithms.map(|(own, test)| own.exp() * (own - test)).sum::<f64>();
        })?;
        Ok(Harm { noise: noise / signal, divergence })
    }

    /// Shares the harm that all `matrices` of 4 bits together do among the choices: by how much
    /// less it is when one of them has 8 bits and the others stay, so that what the matrices behind it
    /// make up for counts less. The harm of 8 bits is less as the errors of the weights are.
    ///
    /// For a budget of decibels it is the noise. Else it is half that and half the divergence, each as
    /// a share of all: the second is what a reader sees, the first is known better from few tokens.
    fn share(
        &self,
        matrices: &BTreeMap<String, QuantizedMatrix>,
        budget: Budget,
        choices: &mut [Choice],
    ) -> Result<(), WeightError> {
        let narrow = widened(&self.model, matrices)?;
        let all = self.harm(&narrow)?;
        let floats = rounded(&self.model).map(|weight| (weight.name(), weight));
        let floats: HashMap<&str, &Weight> = floats.collect();
        let gained =
            |all: f64, left: f64| if all > 0.0 { (1.0 - left / all).max(0.0) } else { 0.0 };
        let mut gains = Vec::with_capacity(choices.len());
        for choice in &*choices {
            let Some(weight) = floats.get(&*choice.name) else { continue };
            let (rows, columns, values) = read(weight)?;
            let eight = round_nearest(&values, rows, columns, WeightBits::Eight)?;
            let raised = narrow.with_weights(vec![widened_matrix(&choice.name, &eight)?])?;
            let left = self.harm(&raised)?;
            let noise = gained(all.noise, left.noise);
            gains.push(match budget {
                Budget::Decibels(_) => noise,
                Budget::Bits(_) => noise + gained(all.divergence, left.divergence),
            });
        }
        // Over few tokens nothing may be seen of a matrix: it counts little then, not nothing.
        let (seen, count) = (gains.iter().sum::<f64>(), gains.len() as f64);
        gains.iter_mut().for_each(|gain| *gain = gain.max(UNSEEN * seen / count));
        let sum: f64 = gains.iter().sum();
        for (choice, gain) in choices.iter_mut().zip(gains) {
            let [four, eight] = choice.harm;
            let less = if four > 0.0 { (eight / four).min(1.0) } else { 1.0 };
            let four = all.noise * if sum > 0.0 { gain / sum } else { 1.0 / count };
            choice.harm = [four, four * less];
        }
        Ok(())
    }
}

/// Least share of a matrix in the harm, of the mean.
const UNSEEN: f64 = 0.1;

/// Errors of logits.
struct Harm {
    /// Noise as a share of the signal.
    noise: f64,
    /// KL divergences of the probabilities of all tokens together, in nats.
    divergence: f64,
}

/// Logarithms of the probabilities that logits say.
fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    logits.iter().map(|logit| f64::from(logit - most) - sum.ln()).collect()
}

/// The matrices that are rounded: those of the layers, and the head.
fn rounded(model: &Checkpoint) -> impl Iterator<Item = &Weight> {
    let layers = model.layers().iter().flat_map(LayerWeights::matrices);
    layers.chain([model.head_weight()])
}

/// Rows, columns and values of a matrix.
pub(super) fn read(weight: &Weight) -> Result<(usize, usize, Vec<f32>), WeightError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    let columns = weight.shape().last().copied().unwrap_or_default();
    Ok((values.len() / columns.max(1), columns, values))
}

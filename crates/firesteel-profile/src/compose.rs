use crate::table::require_length;
use crate::{Measurement, PartKind, ProfileError, Source, Table};
use firesteel_checkpoint::{LayerKind, ModelConfig};
use firesteel_step::{CacheLayout, CacheLayoutChoice};
use serde::Serialize;
use std::collections::BTreeSet;

/// Which measurements of a table make a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Selection {
    /// Runtime and unit.
    pub runtime: String,
    /// Number format.
    pub precision: String,
    /// Spelling of the graph; may be left out where a table has only one.
    pub dialect: Option<String>,
    /// Cache layout.
    pub layout: CacheLayoutChoice,
}

/// How a time came about. Later ones are less certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// The table has this very time.
    Measured,
    /// On the line between the measured contexts around it.
    Interpolated,
    /// On the line through the two nearest measured contexts, outside of all of them; or the time
    /// of a sliding layer whose window this context does not fill.
    Extrapolated,
}

impl Basis {
    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Interpolated => "interpolated",
            Self::Extrapolated => "extrapolated",
        }
    }
}

/// The time of one part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PartTime {
    /// How often the step has this part.
    pub count: usize,
    /// The time of one in ms.
    pub ms: f64,
    /// How it came about.
    pub basis: Basis,
}

impl PartTime {
    /// The time of all of them in ms.
    fn total(&self) -> f64 {
        self.count as f64 * self.ms
    }
}

/// A step at one context, added up. What a missing time would be needed for is `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComposedStep {
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Sliding layers.
    pub sliding: Option<PartTime>,
    /// Full layers.
    pub full: Option<PartTime>,
    /// The head.
    pub head: Option<PartTime>,
    /// All layers without the head, ms.
    pub layers_ms: Option<f64>,
    /// As many layers, all of them full, without the head, ms.
    pub all_full_ms: Option<f64>,
    /// `all_full_ms / layers_ms`: above 1 the sliding layers pay.
    pub speedup: Option<f64>,
    /// Layers and head, ms.
    pub step_ms: Option<f64>,
    /// `1000 / step_ms`.
    pub tokens_per_second: Option<f64>,
    /// The least certain of the times above; `None` when the layers cannot be added up.
    pub basis: Option<Basis>,
    /// Why a part has no time.
    pub missing: Vec<String>,
}

/// From which context on a full layer takes longer than a sliding one, so that the hybrid is
/// faster than the model with full layers only.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "context")]
pub enum BreakEven {
    /// Already at the shortest context that was measured.
    AtMost(usize),
    /// Between two measured contexts, on the line between them.
    Interpolated(usize),
    /// Not up to the longest context that was measured.
    Above(usize),
}

/// Steps composed of measured layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Composition {
    /// The device of the table.
    pub device: String,
    /// Its system on a chip.
    pub soc: String,
    /// What was selected.
    pub selection: Selection,
    /// Whether the times are of builds that compute something else than the model, so that
    /// nothing but the times can be had of them.
    pub timing_only: bool,
    /// The step at each context.
    pub steps: Vec<ComposedStep>,
    /// Where the hybrid starts to pay; `None` for a model of one kind of layer or without times.
    pub break_even: Option<BreakEven>,
    /// Sources of the times.
    pub sources: Vec<Source>,
}

/// The steps of one token of `config` at each of `contexts`, added up from the layers of `table`:
/// sliding layers × their number + full layers × theirs + head. A step is composed of builds that
/// compute the layers where the table has them for every kind of layer, else of the 'timing only'
/// ones, never of both.
///
/// # Errors
/// When the table is of other layers, or has nothing of that runtime, precision or dialect, or a
/// context is out of range. A single missing time is no error.
pub fn compose(
    config: &ModelConfig,
    table: &Table,
    selection: &Selection,
    contexts: &[usize],
) -> Result<Composition, ProfileError> {
    table.require_shape(config)?;
    let rows = select(table, selection)?;
    let series = Series::new(config, selection.layout, &rows, 1);
    let mut steps = Vec::new();
    for &context in contexts {
        require_length("context", context)?;
        steps.push(series.step(context));
    }
    Ok(Composition {
        device: table.device.clone(),
        soc: table.soc.clone(),
        selection: selection.clone(),
        timing_only: series.timing_only,
        steps,
        break_even: series.break_even(),
        sources: series.sources(table),
    })
}

/// A prompt that is run in chunks, each a step of as many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Entries of a full layer's cache, which a chunk attends to whatever its position is.
    pub contexts: &'a [usize],
}

/// A prompt at one context, added up from chunks. What a missing time would be needed for is
/// `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComposedPrompt {
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Chunks, ⌈tokens / chunk⌉. A last one that the prompt does not fill takes as long as the
    /// others, because its shape is the same.
    pub chunks: usize,
    /// Tokens of the prompt in the last chunk.
    pub last_chunk_tokens: usize,
    /// Sliding layers of one chunk.
    pub sliding: Option<PartTime>,
    /// Full layers of one chunk.
    pub full: Option<PartTime>,
    /// The head, which only the last token needs.
    pub head: Option<PartTime>,
    /// The layers of one chunk, ms.
    pub chunk_ms: Option<f64>,
    /// The layers of all chunks, ms.
    pub prompt_ms: Option<f64>,
    /// `1000 · tokens / prompt_ms`.
    pub tokens_per_second: Option<f64>,
    /// All chunks and the head once, ms.
    pub time_to_first_token_ms: Option<f64>,
    /// The same where the tokens of a last chunk that is not full run as steps of one token;
    /// `None` when every chunk is full, too.
    pub rest_in_steps_ms: Option<f64>,
    /// Whether only the times are right: the builds compute something else than the model.
    pub timing_only: bool,
    /// The least certain of the times of a chunk.
    pub basis: Option<Basis>,
    /// Why a time is missing.
    pub missing: Vec<String>,
    /// Sources of the times.
    pub sources: Vec<Source>,
}

/// The time of a prompt at each of its contexts, added up as in [`compose`] from layers that were
/// measured with a chunk's tokens.
///
/// # Errors
/// Those of [`compose`], and when the prompt or a chunk has no tokens or too many. That a table has
/// no layers of so many tokens is no error.
pub fn compose_prompt(
    config: &ModelConfig,
    table: &Table,
    selection: &Selection,
    prompt: &Prompt<'_>,
) -> Result<Vec<ComposedPrompt>, ProfileError> {
    table.require_shape(config)?;
    require_length("prompt", prompt.tokens)?;
    require_length("chunk", prompt.chunk)?;
    let rows = select(table, selection)?;
    let chunk = Series::new(config, selection.layout, &rows, prompt.chunk);
    let single = Series::new(config, selection.layout, &rows, 1);
    let mut prompts = Vec::new();
    for &context in prompt.contexts {
        require_length("context", context)?;
        let sources = chunk.sources(table);
        prompts.push(ComposedPrompt { sources, ..chunk.prompt(prompt, context, &single) });
    }
    Ok(prompts)
}

/// The rows of one runtime, precision and dialect that steps are composed of.
fn select<'a>(
    table: &'a Table,
    selection: &Selection,
) -> Result<Vec<&'a Measurement>, ProfileError> {
    let choice = |what, value: String, known: BTreeSet<&str>| {
        let accepted = known.into_iter().collect::<Vec<_>>().join(", ");
        Err(ProfileError::Choice { what, value, accepted })
    };
    let plain = |row: &&Measurement| row.variant.is_none() && row.kind != PartKind::Block;
    let rows: Vec<&Measurement> = table.measurements.iter().filter(plain).collect();
    let known = rows.iter().map(|row| row.runtime.as_str()).collect();
    let rows: Vec<_> = rows.into_iter().filter(|row| row.runtime == selection.runtime).collect();
    if rows.is_empty() {
        return choice("runtime", selection.runtime.clone(), known);
    }
    let known = rows.iter().map(|row| row.precision.as_str()).collect();
    let rows: Vec<_> =
        rows.into_iter().filter(|row| row.precision == selection.precision).collect();
    if rows.is_empty() {
        return choice("precision", selection.precision.clone(), known);
    }
    let dialects: BTreeSet<Option<&str>> = rows.iter().map(|row| row.dialect.as_deref()).collect();
    let known = || dialects.iter().map(|dialect| dialect.unwrap_or("none named")).collect();
    match &selection.dialect {
        None if dialects.len() > 1 => choice("dialect", "not chosen".into(), known()),
        None => Ok(rows),
        Some(dialect) => {
            let same = |row: &&Measurement| row.dialect.as_ref() == Some(dialect);
            let rows: Vec<_> = rows.into_iter().filter(same).collect();
            if rows.is_empty() { choice("dialect", dialect.clone(), known()) } else { Ok(rows) }
        }
    }
}

/// The times of a model's parts.
struct Series<'a> {
    /// Tokens of a step.
    tokens: usize,
    /// Sliding and full layers of the model.
    counts: [usize; 2],
    sliding: Option<&'a Measurement>,
    /// By context.
    full: Vec<(usize, &'a Measurement)>,
    head: Option<&'a Measurement>,
    timing_only: bool,
    /// Shortest context that fills a sliding layer's cache.
    window: usize,
}

impl<'a> Series<'a> {
    /// Layers with `tokens` tokens, and the head of one.
    fn new(
        config: &ModelConfig,
        layout: CacheLayoutChoice,
        rows: &[&'a Measurement],
        tokens: usize,
    ) -> Self {
        let counts =
            LayerKind::ALL.map(|kind| config.layer_types.iter().filter(|k| **k == kind).count());
        let of = |timing_only: bool, kind: LayerKind| {
            let wanted = Some(layout.layout(kind));
            rows.iter().copied().filter(move |row| {
                row.timing_only == timing_only
                    && row.tokens == tokens
                    && row.kind == PartKind::from(kind)
                    && row.layout == wanted
            })
        };
        let complete = |timing_only: bool| {
            let kinds = LayerKind::ALL.into_iter().zip(counts);
            kinds.into_iter().all(|(kind, n)| n == 0 || of(timing_only, kind).next().is_some())
        };
        let timing_only = !complete(false) && complete(true);
        let mut full: Vec<_> = of(timing_only, LayerKind::Full)
            .filter_map(|row| row.context.map(|context| (context, row)))
            .collect();
        full.sort_by_key(|(context, _)| *context);
        let head = |row: &&Measurement| {
            row.kind == PartKind::Head && row.timing_only == timing_only && row.tokens == 1
        };
        let window = config.sliding_window.unwrap_or(1);
        Self {
            tokens,
            counts,
            sliding: of(timing_only, LayerKind::Sliding).next(),
            full,
            head: rows.iter().copied().find(head),
            timing_only,
            window: match layout.layout(LayerKind::Sliding) {
                CacheLayout::Ring => window.saturating_sub(1),
                CacheLayout::Roll => window,
            },
        }
    }

    /// The measurements that can be part of a step.
    fn rows(&self) -> impl Iterator<Item = &'a Measurement> {
        let full = self.full.iter().map(|(_, row)| *row);
        self.sliding.into_iter().chain(full).chain(self.head)
    }

    /// Where the times are from, in the order of the table.
    fn sources(&self, table: &Table) -> Vec<Source> {
        let used: BTreeSet<&str> = self.rows().map(|row| row.source.as_str()).collect();
        let sources = table.sources.iter();
        sources.filter(|source| used.contains(source.id.as_str())).cloned().collect()
    }

    /// How a layer of this kind was measured, for messages: ` with 128 tokens`.
    fn with_tokens(&self) -> String {
        if self.tokens == 1 { String::new() } else { format!(" with {} tokens", self.tokens) }
    }

    /// A prompt of chunks of these layers; `single` has those of one token.
    fn prompt(&self, prompt: &Prompt<'_>, context: usize, single: &Self) -> ComposedPrompt {
        let Prompt { tokens, chunk, .. } = *prompt;
        let step = self.step(context);
        let whole = tokens / chunk;
        let rest = tokens % chunk;
        let chunks = whole + usize::from(rest > 0);
        let mut missing = step.missing;
        let fits = tokens <= context;
        if !fits {
            missing = vec![format!("a prompt of {tokens} does not fit in a context of {context}")];
        }
        let chunk_ms = step.layers_ms;
        let prompt_ms = chunk_ms.filter(|_| fits).map(|ms| ms * chunks as f64);
        let head_ms = step.head.as_ref().map(PartTime::total);
        let add = |layers: Option<f64>| layers.zip(head_ms).map(|(layers, head)| layers + head);
        let in_steps = chunk_ms
            .zip(single.step(context).layers_ms)
            .filter(|_| fits && rest > 0 && single.timing_only == self.timing_only)
            .map(|(chunk, step)| whole as f64 * chunk + rest as f64 * step);
        ComposedPrompt {
            context,
            tokens,
            chunk,
            chunks,
            last_chunk_tokens: if rest > 0 { rest } else { chunk },
            sliding: step.sliding,
            full: step.full,
            head: step.head,
            chunk_ms,
            prompt_ms,
            tokens_per_second: prompt_ms.map(|ms| 1000.0 * tokens as f64 / ms),
            time_to_first_token_ms: add(prompt_ms),
            rest_in_steps_ms: add(in_steps),
            timing_only: self.timing_only,
            basis: step.basis,
            missing,
            sources: Vec::new(),
        }
    }

    /// A sliding layer's time.
    fn sliding_time(&self, context: usize) -> Option<(f64, Basis)> {
        let full = context >= self.window;
        let basis = if full { Basis::Measured } else { Basis::Extrapolated };
        self.sliding.map(|row| (row.ms, basis))
    }

    /// A full layer's time, or why there is none.
    fn full_time(&self, context: usize) -> Result<(f64, Basis), String> {
        if let Some((_, row)) = self.full.iter().find(|(measured, _)| *measured == context) {
            return Ok((row.ms, Basis::Measured));
        }
        let (kind, with) = (PartKind::Full, self.with_tokens());
        let after = self.full.partition_point(|(measured, _)| *measured < context);
        let (pair, basis) = match (self.full.as_slice(), after) {
            ([], _) => return Err(format!("{kind} was not measured{with}")),
            ([(only, _)], _) => return Err(format!("{kind} was measured{with} at {only} only")),
            (all, 0) => (all.get(..2), Basis::Extrapolated),
            (all, after) if after == all.len() => (all.get(after - 2..), Basis::Extrapolated),
            (all, after) => (all.get(after - 1..=after), Basis::Interpolated),
        };
        let Some([(c0, t0), (c1, t1)]) = pair else {
            return Err(format!("{kind} was not measured{with}"));
        };
        let part = (context as f64 - *c0 as f64) / (*c1 as f64 - *c0 as f64);
        let ms = t0.ms + part * (t1.ms - t0.ms);
        if ms > 0.0 {
            Ok((ms, basis))
        } else {
            Err(format!("{kind}: the line through {c0} and {c1} has no time at {context}"))
        }
    }

    fn step(&self, context: usize) -> ComposedStep {
        let [sliding_count, full_count] = self.counts;
        let mut missing = Vec::new();
        let part = |count: usize, (ms, basis): (f64, Basis)| PartTime { count, ms, basis };
        let sliding = self.sliding_time(context).map(|time| part(sliding_count, time));
        if sliding.is_none() && sliding_count > 0 {
            missing.push(format!("{} was not measured{}", PartKind::Sliding, self.with_tokens()));
        }
        let sliding = sliding.filter(|_| sliding_count > 0);
        // The model with full layers only needs the time even where this one has no full layer.
        let any_full = self.full_time(context).map_err(|reason| missing.push(reason)).ok();
        let full = any_full.filter(|_| full_count > 0).map(|time| part(full_count, time));
        let head = self.head.map(|row| part(1, (row.ms, Basis::Measured)));
        if head.is_none() {
            missing.push(format!("{} was not measured", PartKind::Head));
        }
        let total = |count: usize, time: &Option<PartTime>| match count {
            0 => Some(0.0),
            _ => time.as_ref().map(PartTime::total),
        };
        let layers_ms = total(sliding_count, &sliding)
            .zip(total(full_count, &full))
            .map(|(sliding, full)| sliding + full);
        let all = sliding_count + full_count;
        let all_full_ms = any_full.map(|time| part(all, time).total());
        let step_ms = layers_ms.zip(head).map(|(layers, head)| layers + head.total());
        ComposedStep {
            context,
            sliding,
            full,
            head,
            layers_ms,
            all_full_ms,
            speedup: all_full_ms.zip(layers_ms).map(|(full, layers)| full / layers),
            step_ms,
            tokens_per_second: step_ms.map(|ms| 1000.0 / ms),
            basis: layers_ms.and_then(|_| {
                let times = [sliding, any_full.map(|time| part(all, time)), head];
                times.into_iter().flatten().map(|part| part.basis).max()
            }),
            missing,
        }
    }

    fn break_even(&self) -> Option<BreakEven> {
        if self.counts.contains(&0) {
            return None;
        }
        let sliding = self.sliding?.ms;
        let pays = self.full.iter().position(|(_, row)| row.ms >= sliding);
        let Some(pays) = pays else {
            return self.full.last().map(|(context, _)| BreakEven::Above(*context));
        };
        let (c1, t1) = self.full.get(pays)?;
        let Some((c0, t0)) = pays.checked_sub(1).and_then(|before| self.full.get(before)) else {
            return Some(BreakEven::AtMost(*c1));
        };
        // The times differ, because one is below the sliding layer's and the other is not.
        let part = (sliding - t0.ms) / (t1.ms - t0.ms);
        let context = *c0 as f64 + part * (*c1 as f64 - *c0 as f64);
        Some(BreakEven::Interpolated((context.ceil() as usize).min(*c1)))
    }
}

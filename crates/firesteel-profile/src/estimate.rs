use crate::fit::{Fit, FitSelection, fit};
use crate::groups::{Group, Grouped};
use crate::table::require_length;
use crate::traffic::{
    Cost, ElementBits, NodeCost, count_graph, is_head, largest_working_set, peak_activations,
};
use crate::{KvElement, PartKind, ProfileError, Provenance, Quantity, Table};
use firesteel_check::audit::Schematic;
use firesteel_checkpoint::{Checkpoint, LayerKind, ModelConfig, RandomWeights};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, StepGraphs, build};
use firesteel_graph::Graph;
use firesteel_step::{CacheLayoutChoice, Logits};
use serde::Serialize;
use std::collections::HashMap;

/// A step of one token that could be exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StepChoice {
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Cache layout.
    pub layout: CacheLayoutChoice,
    /// Number format, as a table names it.
    pub precision: String,
    /// Number format of cache entries; `None` for that of the activations.
    pub kv: Option<KvElement>,
    /// Form of the activation.
    pub gelu: Gelu,
    /// Graphs that the head is cut into; 0 for a step without final norm and head.
    pub head_shards: usize,
}

/// What one kind of part of a step costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartCost {
    /// The part.
    pub kind: PartKind,
    /// How often the step has it.
    pub count: usize,
    /// The cost of one. Where the parts of a kind differ, as those of a sharded head, the mean of
    /// them, rounded down.
    pub cost: Cost,
    /// Of the bytes that operators move, those that joining, cutting and transposing caches moves.
    pub cache_moves_bytes: u64,
    /// Bytes that the compiler plans to read from memory and write to it, for one; `None` where
    /// nothing was compiled.
    pub compiled_memory_bytes: Option<u64>,
}

/// The costs of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepCost {
    /// Sliding layers, full layers and head, as far as the step has them.
    pub parts: Vec<PartCost>,
    /// The sum over all parts.
    pub total: Cost,
    /// Bytes that have to cross the memory, of `total`.
    pub memory_bytes: u64,
    /// The most bytes of activations that are alive at the same time in one of its graphs, in which
    /// a layer of each kind stands for all.
    pub activation_bytes: u64,
    /// The operator that reads and writes most activations and cache entries.
    pub largest_operator: Option<LargestOperator>,
    /// The nodes of all parts, each as often as the step has it.
    #[serde(skip)]
    pub nodes: Vec<NodeCost>,
}

/// The operator with the largest working set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LargestOperator {
    /// Name of its node.
    pub node: String,
    /// Bytes of activations and cache entries that it reads and writes. Matrices are not counted:
    /// they are streamed in tiles.
    pub bytes: u64,
}

impl StepCost {
    /// Adds the nodes of each part up: `sliding`, `full` and `head` are lists of nodes, one of
    /// them for each layer or graph of the head.
    fn from_parts(
        parts: [(PartKind, Vec<Vec<NodeCost>>); 3],
        activation_bytes: u64,
    ) -> Result<Self, ProfileError> {
        let overflow = || ProfileError::Overflow { what: "a step" };
        let (mut costs, mut total, mut all) = (Vec::new(), Cost::default(), Vec::new());
        for (kind, members) in parts {
            if members.is_empty() {
                continue;
            }
            let (mut sum, mut moves) = (Cost::default(), 0u64);
            for node in members.iter().flatten() {
                sum = sum.plus(node.cost).ok_or_else(overflow)?;
                if node.group == Group::CacheMoves {
                    // Part of a sum that fits.
                    moves += node.cost.moved_bytes;
                }
            }
            total = total.plus(sum).ok_or_else(overflow)?;
            let count = members.len();
            costs.push(PartCost {
                kind,
                count,
                cost: sum.divided(count as u64),
                cache_moves_bytes: moves / count as u64,
                compiled_memory_bytes: None,
            });
            all.extend(members.into_iter().flatten());
        }
        let largest_operator = largest_working_set(&all)
            .map(|(node, bytes)| LargestOperator { node: node.to_owned(), bytes });
        Ok(Self {
            parts: costs,
            memory_bytes: total.memory_bytes(),
            total,
            activation_bytes,
            largest_operator,
            nodes: all,
        })
    }

    /// The cost of the step of `config` that `choice` describes, from the graphs that an export
    /// in the qnn dialect writes. No weight is read, and a layer of each kind stands for all.
    ///
    /// # Errors
    /// When the choice and the model do not fit each other, or a count does not fit in 64 bits.
    pub fn of_choice(config: &ModelConfig, choice: &StepChoice) -> Result<Self, ProfileError> {
        require_length("context", choice.context)?;
        let bits = ElementBits::named(&choice.precision, choice.kv)?;
        let weights = RandomWeights::default();
        let checkpoint = Checkpoint::random(config.clone(), weights);
        let make = |layer: usize, logits: Logits| -> Result<StepGraphs, ProfileError> {
            let head = logits != Logits::Hidden;
            let options = ExportOptions {
                tokens: 1,
                context: choice.context,
                layers: layer..layer + 1,
                cache_layout: choice.layout,
                logits,
                gelu: choice.gelu,
                precision: match choice.precision.as_str() {
                    "fp16" => Precision::Fp16,
                    _ => Precision::Fp32,
                },
                dialect: Dialect::Qnn,
                head_shards: if head { choice.head_shards } else { 1 },
            };
            Ok(build(&checkpoint, &options)?)
        };
        let mut peak = 0;
        let mut count = |graph: &Graph| {
            peak = peak_activations(graph, Some(bits))?.max(peak);
            count_graph(graph, Some(bits))
        };
        let mut layers: Vec<Vec<Vec<NodeCost>>> = Vec::new();
        for kind in LayerKind::ALL {
            let found = config.layer_types.iter().position(|k| *k == kind);
            let nodes = match found {
                Some(layer) => count(&make(layer, Logits::Hidden)?.graph)?,
                None => Vec::new(),
            };
            let layers_of_kind = config.layer_types.iter().filter(|k| **k == kind).count();
            layers.push(vec![nodes; layers_of_kind]);
        }
        let full = layers.pop().unwrap_or_default();
        let sliding = layers.pop().unwrap_or_default();
        let head = match choice.head_shards {
            0 => Vec::new(),
            1 => {
                let mut nodes = count(&make(0, Logits::Last)?.graph)?;
                nodes.retain(NodeCost::is_head);
                vec![nodes]
            }
            _ => {
                let step = make(0, Logits::Last)?;
                let graphs = step.heads.iter().map(|head| count(&head.graph));
                graphs.collect::<Result<_, _>>()?
            }
        };
        let parts = [(PartKind::Sliding, sliding), (PartKind::Full, full), (PartKind::Head, head)];
        Self::from_parts(parts, peak)
    }

    /// The cost of the graphs of an artifact: the step, then the parts of the head. `kinds` are
    /// those of its layers, the first of which has the number `first_layer` in the model.
    ///
    /// # Errors
    /// When a count does not fit in 64 bits.
    pub fn of_graphs(
        graphs: &[Graph],
        kinds: &[LayerKind],
        first_layer: usize,
    ) -> Result<Self, ProfileError> {
        let mut layers: Vec<Vec<NodeCost>> = vec![Vec::new(); kinds.len()];
        let mut heads = Vec::new();
        for (index, graph) in graphs.iter().enumerate() {
            let mut head = Vec::new();
            for node in count_graph(graph, None)? {
                let layer = node.layer.and_then(|layer| layer.checked_sub(first_layer));
                match layer.and_then(|layer| layers.get_mut(layer)) {
                    Some(nodes) => nodes.push(node),
                    // What enters and leaves the layers is theirs.
                    None if index == 0 && !node.is_head() => {
                        if let Some(nodes) = layers.first_mut() {
                            nodes.push(node);
                        }
                    }
                    None => head.push(node),
                }
            }
            if !head.is_empty() {
                heads.push(head);
            }
        }
        let mut of_kind = |kind: LayerKind| {
            let nodes = layers.iter_mut().zip(kinds).filter(|(_, k)| **k == kind);
            nodes.map(|(nodes, _)| std::mem::take(nodes)).collect::<Vec<_>>()
        };
        let (sliding, full) = (of_kind(LayerKind::Sliding), of_kind(LayerKind::Full));
        let peaks = graphs.iter().map(|graph| peak_activations(graph, None));
        let peak = peaks.collect::<Result<Vec<u64>, _>>()?.into_iter().max().unwrap_or(0);
        let parts = [(PartKind::Sliding, sliding), (PartKind::Full, full), (PartKind::Head, heads)];
        Self::from_parts(parts, peak)
    }

    /// Puts what the compiler planned for the same graphs beside the counts. Bytes that belong to
    /// no layer and not to the head, as the border's, are spread over all layers.
    pub fn with_schematics<'a>(
        mut self,
        schematics: impl IntoIterator<Item = &'a Schematic>,
        kinds: &[LayerKind],
        first_layer: usize,
    ) -> Self {
        let (mut of_kind, mut head, mut rest) = ([0u64; 2], 0u64, 0u64);
        for node in schematics.into_iter().flat_map(|schematic| &schematic.nodes) {
            let bytes = node.traffic.dram_read.saturating_add(node.traffic.dram_write);
            let layer = node.tag.and_then(|tag| tag.layer?.checked_sub(first_layer));
            let layer = layer.and_then(|layer| kinds.get(layer));
            let sum = match layer {
                Some(LayerKind::Sliding) => &mut of_kind[0],
                Some(LayerKind::Full) => &mut of_kind[1],
                None if node.tag.is_some_and(|tag| is_head(tag.part)) => &mut head,
                None => &mut rest,
            };
            *sum = sum.saturating_add(bytes);
        }
        let share = rest / (kinds.len().max(1) as u64);
        for part in &mut self.parts {
            let count = part.count.max(1) as u64;
            part.compiled_memory_bytes = Some(match part.kind {
                PartKind::Sliding => of_kind[0] / count + share,
                PartKind::Full => of_kind[1] / count + share,
                _ => head / count,
            });
        }
        self
    }

    /// The bytes that operators move, by group.
    fn moved_by_group(&self) -> Grouped {
        self.grouped("activations and cache entries, counted", |cost| cost.moved_bytes)
    }

    /// The bytes that have to cross the memory, by group.
    fn memory_by_group(&self) -> Grouped {
        self.grouped("weights, caches and border, counted", |cost| cost.memory_bytes())
    }

    fn grouped(&self, source: &str, amount: impl Fn(&Cost) -> u64) -> Grouped {
        let nodes = self.nodes.iter().map(|node| (node.group, amount(&node.cost) as f64));
        Grouped::from_amounts(Quantity::Bytes, Provenance::Estimated, source.to_owned(), nodes)
    }
}

impl Cost {
    fn divided(self, count: u64) -> Self {
        let count = count.max(1);
        Self {
            weight_bytes: self.weight_bytes / count,
            cache_read_bytes: self.cache_read_bytes / count,
            cache_written_bytes: self.cache_written_bytes / count,
            border_bytes: self.border_bytes / count,
            moved_bytes: self.moved_bytes / count,
            operations: self.operations / count,
        }
    }
}

/// The estimated time of one kind of part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EstimatedPart {
    /// The part.
    pub kind: PartKind,
    /// How often the step has it.
    pub count: usize,
    /// The time of one in ms.
    pub ms: f64,
    /// The same with the bytes that the compiler plans to move in the place of those counted.
    pub compiled_ms: Option<f64>,
    /// In what it lies outside of the rows that were fitted, so that its time is an extrapolation.
    pub beyond: Vec<String>,
}

/// The costs of a step, and its estimated time where a device was fitted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// The costs.
    pub cost: StepCost,
    /// Bytes that cross the memory, by group of operators.
    pub memory_by_group: Grouped,
    /// Bytes that operators move, by group of operators.
    pub moved_by_group: Grouped,
    /// The time; `None` without a fit.
    pub time: Option<EstimatedStep>,
}

impl Estimate {
    /// The step with these costs on the device of `fit`.
    pub fn new(cost: StepCost, fit: Option<&Fit>) -> Self {
        Self {
            memory_by_group: cost.memory_by_group(),
            moved_by_group: cost.moved_by_group(),
            time: fit.map(|fit| EstimatedStep::new(&cost, fit)),
            cost,
        }
    }
}

/// The estimated time of a step. Nothing of it is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EstimatedStep {
    /// Always [`Provenance::Estimated`].
    pub basis: Provenance,
    /// Its parts.
    pub parts: Vec<EstimatedPart>,
    /// All parts, ms.
    pub step_ms: f64,
    /// The same with what the compiler plans.
    pub compiled_step_ms: Option<f64>,
    /// `1000 / step_ms`; `None` for layers without a head, which make no token.
    pub tokens_per_second: Option<f64>,
    /// The estimated time by group of operators: each group's share of what the fit's terms count.
    pub groups: Vec<GroupTime>,
}

/// The estimated time of a group of operators.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GroupTime {
    /// The group; `None` for the time that each part takes whatever is in it.
    pub group: Option<Group>,
    /// All of its operators, ms.
    pub ms: f64,
    /// Share of the step.
    pub share: f64,
}

impl EstimatedStep {
    /// The time of a step of one token with this cost, by a device's fit.
    pub fn new(cost: &StepCost, fit: &Fit) -> Self {
        let parts: Vec<EstimatedPart> = cost
            .parts
            .iter()
            .map(|part| EstimatedPart {
                kind: part.kind,
                count: part.count,
                ms: fit.ms(&part.cost, 1.0),
                compiled_ms: part
                    .compiled_memory_bytes
                    .map(|bytes| fit.ms_with_memory(&part.cost, bytes, 1.0)),
                beyond: fit.beyond(&part.cost),
            })
            .collect();
        let sum = |ms: &dyn Fn(&EstimatedPart) -> Option<f64>| {
            parts.iter().map(|part| Some(part.count as f64 * ms(part)?)).sum::<Option<f64>>()
        };
        let step_ms = sum(&|part| Some(part.ms)).unwrap_or_default();
        let mut groups: Vec<GroupTime> = Group::ALL
            .into_iter()
            .map(|group| {
                let nodes = cost.nodes.iter().filter(|node| node.group == group);
                (Some(group), nodes.map(|node| fit.ms(&node.cost, 0.0)).sum::<f64>())
            })
            .chain([(None, {
                let parts: usize = cost.parts.iter().map(|part| part.count).sum();
                fit.ms(&Cost::default(), parts as f64)
            })])
            .filter(|(_, ms)| *ms > 0.0)
            .map(|(group, ms)| GroupTime {
                group,
                ms,
                share: if step_ms > 0.0 { ms / step_ms } else { 0.0 },
            })
            .collect();
        groups.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Self {
            basis: Provenance::Estimated,
            step_ms,
            compiled_step_ms: sum(&|part| part.compiled_ms),
            tokens_per_second: parts
                .iter()
                .any(|part| part.kind == PartKind::Head)
                .then(|| 1000.0 / step_ms),
            groups,
            parts,
        }
    }

    /// The share of a group.
    pub fn share(&self, group: Group) -> f64 {
        self.groups.iter().find(|found| found.group == Some(group)).map_or(0.0, |found| found.share)
    }
}

/// One step of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// In what it differs from the base, which is called `base`.
    pub name: String,
    /// The step.
    pub choice: StepChoice,
    /// Bytes that have to cross the memory.
    pub memory_bytes: u64,
    /// Bytes that operators move.
    pub moved_bytes: u64,
    /// Bytes that the movement of caches moves, of `moved_bytes`.
    pub cache_moves_bytes: u64,
    /// Estimated time in ms; `None` when its precision cannot be fitted.
    pub step_ms: Option<f64>,
    /// `step_ms` minus that of the base.
    pub difference_ms: Option<f64>,
    /// `difference_ms` divided by the time of the base.
    pub difference: Option<f64>,
    /// Whether part of the step lies outside of the rows that were fitted.
    pub beyond: Option<bool>,
    /// Why there is no time.
    pub missing: Option<String>,
}

/// What to compare the base with.
#[derive(Debug, Clone, Default)]
pub struct WhatIf {
    /// Further contexts.
    pub contexts: Vec<usize>,
    /// Runtime and dialect of the rows of all precisions.
    pub selection: FitSelection,
}

/// The base and its alternatives, which differ from it in one thing each: the cache layout, the
/// context, the precision (those that the table has for the runtime and whose names tell their
/// bits), the form of the activation, the number of graphs of the head, and the number format of the
/// caches. The base comes first.
///
/// # Errors
/// As [`StepCost::of_choice`] for the base. An alternative that its precision's rows cannot be
/// fitted for has no time and says why.
pub fn what_if(
    config: &ModelConfig,
    table: &Table,
    base: &StepChoice,
    what: &WhatIf,
) -> Result<Vec<Alternative>, ProfileError> {
    let mut choices: Vec<(String, StepChoice)> = vec![("base".into(), base.clone())];
    let mut add = |name: String, change: &dyn Fn(&mut StepChoice)| {
        let mut choice = base.clone();
        change(&mut choice);
        if choices.iter().all(|(_, known)| *known != choice) {
            choices.push((name, choice));
        }
    };
    // The graph of a full layer is the same in both layouts.
    let sliding = |layout: CacheLayoutChoice| {
        let any = config.layer_types.contains(&LayerKind::Sliding);
        any.then(|| layout.layout(LayerKind::Sliding))
    };
    for (name, layout) in [("ring", CacheLayoutChoice::Ring), ("roll", CacheLayoutChoice::Roll)] {
        if sliding(layout) != sliding(base.layout) {
            add(format!("layout {name}"), &|choice| choice.layout = layout);
        }
    }
    for &context in &what.contexts {
        add(format!("context {context}"), &|choice| choice.context = context);
    }
    let rows = table.measurements.iter();
    let known: Vec<&str> = rows
        .filter(|row| row.runtime == what.selection.runtime && row.tokens == 1)
        .map(|row| row.precision.as_str())
        .filter(|precision| ElementBits::named(precision, None).is_ok())
        .collect();
    for precision in known {
        add(format!("precision {precision}"), &|choice| {
            choice.precision = precision.to_owned();
            choice.kv = None;
        });
    }
    for gelu in [Gelu::Exact, Gelu::Tanh, Gelu::Sigmoid] {
        let name = format!("{gelu:?}").to_lowercase();
        add(format!("gelu {name}"), &|choice| choice.gelu = gelu);
    }
    for shards in [1, 8].into_iter().filter(|_| base.head_shards > 0) {
        add(format!("head in {shards}"), &|choice| choice.head_shards = shards);
    }
    let bits = ElementBits::named(&base.precision, base.kv)?;
    for (kv, width) in [(KvElement::I8, 8), (KvElement::I16, 16)] {
        if bits.cache != width && ElementBits::named(&base.precision, Some(kv)).is_ok() {
            add(format!("kv {kv}"), &|choice| choice.kv = Some(kv));
        }
    }
    let mut fits: HashMap<String, Result<Fit, String>> = HashMap::new();
    let mut compared: Vec<Alternative> = Vec::with_capacity(choices.len());
    for (name, choice) in choices {
        let cost = StepCost::of_choice(config, &choice)?;
        let fitted = fits.entry(choice.precision.clone()).or_insert_with_key(|precision| {
            let selection = FitSelection { precision: precision.clone(), ..what.selection.clone() };
            fit(config, table, &selection).map_err(|error| error.to_string())
        });
        let (time, missing) = match fitted {
            Ok(fit) => (Some(EstimatedStep::new(&cost, fit)), None),
            Err(reason) => (None, Some(reason.clone())),
        };
        let step_ms = time.as_ref().map(|time| time.step_ms);
        let base_ms = compared.first().map_or(step_ms, |base| base.step_ms);
        let difference_ms = step_ms.zip(base_ms).map(|(own, base)| own - base);
        let moves = cost.parts.iter();
        compared.push(Alternative {
            name,
            choice,
            memory_bytes: cost.memory_bytes,
            moved_bytes: cost.total.moved_bytes,
            cache_moves_bytes: moves
                .map(|part| part.cache_moves_bytes.saturating_mul(part.count as u64))
                .fold(0, u64::saturating_add),
            step_ms,
            difference_ms,
            difference: difference_ms.zip(base_ms).map(|(difference, base)| difference / base),
            beyond: time.map(|time| time.parts.iter().any(|part| !part.beyond.is_empty())),
            missing,
        });
    }
    Ok(compared)
}

/// The share of the bytes that operators move which is the movement of caches, for one layer of
/// the window, in both layouts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CacheMoves {
    /// Share in a sliding layer that keeps its window as a ring.
    pub ring_share: f64,
    /// Bytes in that layer.
    pub ring_bytes: u64,
    /// Share in a sliding layer that rolls its window.
    pub roll_share: f64,
    /// Bytes in that layer: the rolled windows are returned.
    pub roll_bytes: u64,
}

/// The movement of caches in a sliding layer of `config`, kept as a ring and rolled; `None` for a
/// model without sliding layers.
///
/// # Errors
/// As [`StepCost::of_choice`].
pub fn cache_moves(
    config: &ModelConfig,
    choice: &StepChoice,
) -> Result<Option<CacheMoves>, ProfileError> {
    let mut found = Vec::new();
    for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
        let cost = StepCost::of_choice(config, &StepChoice { layout, ..choice.clone() })?;
        let Some(part) = cost.parts.iter().find(|part| part.kind == PartKind::Sliding) else {
            return Ok(None);
        };
        let share = part.cache_moves_bytes as f64 / part.cost.moved_bytes.max(1) as f64;
        found.push((share, part.cache_moves_bytes));
    }
    Ok(match found[..] {
        [(ring_share, ring_bytes), (roll_share, roll_bytes)] => {
            Some(CacheMoves { ring_share, ring_bytes, roll_share, roll_bytes })
        }
        _ => None,
    })
}

use crate::table::require_length;
use crate::{ModelBytes, ProfileError, StepChoice, StepCost};
use firesteel_checkpoint::ModelConfig;
use firesteel_engine::KvFormat;
use firesteel_export::Gelu;
use firesteel_step::{CacheLayoutChoice, kv_bytes};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Bytes that one graph of a Hexagon session can address.
pub const GRAPH_LIMIT: u64 = 2 << 30;

/// Number format of cache entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvElement {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    F16,
    /// 2 bytes, one scale a graph.
    I16,
    /// 1 byte, one scale a graph.
    I8,
    /// The engine's blocks: 34 bytes for 32 elements.
    Q8,
}

impl KvElement {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::I16, Self::I8, Self::Q8];

    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::Q8 => "q8",
        }
    }

    /// Bytes of `elements` elements of whole heads; `None` when they do not fit in 64 bits.
    fn bytes(self, elements: u64) -> Option<u64> {
        let bytes = match self {
            Self::F32 => elements.checked_mul(4)?,
            Self::F16 | Self::I16 => elements.checked_mul(2)?,
            Self::I8 => elements,
            // A block has more bytes than elements.
            Self::Q8 => {
                elements.checked_mul(2)?;
                KvFormat::Q8.bytes(usize::try_from(elements).ok()?) as u64
            }
        };
        Some(bytes)
    }
}

impl fmt::Display for KvElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvElement {
    type Err = ProfileError;

    fn from_str(name: &str) -> Result<Self, ProfileError> {
        Self::ALL.into_iter().find(|element| element.name() == name).ok_or_else(|| {
            ProfileError::Choice {
                what: "key/value format",
                value: format!("{name:?}"),
                accepted: Self::ALL.map(Self::name).join(", "),
            }
        })
    }
}

/// What to count.
#[derive(Debug, Clone)]
pub struct MemoryRequest<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// Its weights in one or several formats, with their names.
    pub weights: &'a [(String, ModelBytes)],
    /// Contexts.
    pub contexts: &'a [usize],
    /// Cache layout.
    pub layout: CacheLayoutChoice,
    /// Number format of cache entries.
    pub kv: KvElement,
    /// Memory of a device in bytes.
    pub ram: Option<u64>,
}

/// Bytes of a model's weights and caches. Every one is counted from shapes; none is measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Cache layout.
    pub layout: CacheLayoutChoice,
    /// Number format of cache entries.
    pub kv: KvElement,
    /// Memory of the device.
    pub ram_bytes: Option<u64>,
    /// Bytes that a graph can address.
    pub graph_limit_bytes: u64,
    /// The compiled graph; known once there is one.
    pub context_binary_bytes: Option<u64>,
    /// What a compiled graph spills and fills; known from a compiled graph only.
    pub spill_bytes: Option<u64>,
    /// The counts at each context.
    pub contexts: Vec<ContextMemory>,
}

/// Bytes at one context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContextMemory {
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Keys and values of one sequence: the cache inputs of a step.
    pub kv_bytes: u64,
    /// The same if every layer kept the whole context.
    pub kv_all_full_bytes: u64,
    /// The most activations that are alive at the same time in a step of one token, as its graph
    /// is exported ([`StepCost`](crate::StepCost)): 16 bits each, or 32 beside caches of f32.
    /// `None` with caches in blocks, which no graph has.
    pub activation_bytes: Option<u64>,
    /// One for each format of the weights.
    pub plans: Vec<MemoryPlan>,
}

/// A model in one format of its weights, at one context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Name of the format.
    pub weights: String,
    /// All weights, a tied table once.
    pub weight_bytes: u64,
    /// Weights and caches. Activations, binaries and what else a device needs come on top.
    pub total_bytes: u64,
    /// Whether weights and caches alone fit in the device's memory; `None` without one.
    pub weights_and_kv_fit: Option<bool>,
    /// The fewest graphs of consecutive layers that each stay within [`GRAPH_LIMIT`], filled from
    /// the front; `None` when one layer or the head alone does not.
    pub graphs: Option<Vec<GraphPart>>,
    /// Why there are no graphs.
    pub unsplittable: Option<String>,
}

/// One graph: what it addresses are its weights and its cache inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GraphPart {
    /// Its first layer.
    pub first_layer: usize,
    /// The layer after its last; `first_layer` for a graph of the head alone.
    pub end_layer: usize,
    /// Whether final norm and head are in it.
    pub head: bool,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Bytes of its cache inputs.
    pub kv_bytes: u64,
}

/// Bytes of weights and caches at each context, and the graphs that a Hexagon session could hold.
/// Caches are those of the step contract ([`kv_bytes`]).
///
/// # Errors
/// When a context is out of range, a format does not suit the model, or a count does not fit in
/// 64 bits.
pub fn memory(request: &MemoryRequest<'_>) -> Result<Memory, ProfileError> {
    let MemoryRequest { config, contexts, layout, kv, ram, .. } = request;
    if *kv == KvElement::Q8 && !config.head_dim.is_multiple_of(32) {
        return Err(ProfileError::Choice {
            what: "key/value format",
            value: format!("q8 with a head_dim of {}", config.head_dim),
            accepted: "q8 with whole blocks of 32, or f16".into(),
        });
    }
    let mut counted = Vec::new();
    for &context in *contexts {
        require_length("context", context)?;
        counted.push(at_context(request, context)?);
    }
    Ok(Memory {
        layout: *layout,
        kv: *kv,
        ram_bytes: *ram,
        graph_limit_bytes: GRAPH_LIMIT,
        context_binary_bytes: None,
        spill_bytes: None,
        contexts: counted,
    })
}

fn at_context(request: &MemoryRequest<'_>, context: usize) -> Result<ContextMemory, ProfileError> {
    let MemoryRequest { config, weights, layout, kv, ram, .. } = request;
    let overflow = |what| ProfileError::Overflow { what };
    let elements = |layers| kv_bytes(config, layers, context, *layout, 1);
    let bytes = |elements: u64| kv.bytes(elements).ok_or_else(|| overflow("the caches"));
    let all = elements(0..config.num_layers()).ok_or_else(|| overflow("the caches"))?;
    let (kv_total, kv_all_full) = (bytes(all.hybrid)?, bytes(all.uniform)?);
    let mut layers = Vec::with_capacity(config.num_layers());
    for layer in 0..config.num_layers() {
        let one = elements(layer..layer + 1).ok_or_else(|| overflow("the caches"))?;
        layers.push(bytes(one.hybrid)?);
    }
    let mut plans = Vec::with_capacity(weights.len());
    for (name, weights) in *weights {
        let weight_bytes = weights.total();
        let total_bytes =
            weight_bytes.checked_add(kv_total).ok_or_else(|| overflow("weights and caches"))?;
        let split = split(weights, &layers);
        plans.push(MemoryPlan {
            weights: name.clone(),
            weight_bytes,
            total_bytes,
            weights_and_kv_fit: ram.map(|ram| total_bytes <= ram),
            unsplittable: split.as_ref().err().cloned(),
            graphs: split.ok(),
        });
    }
    Ok(ContextMemory {
        context,
        kv_bytes: kv_total,
        kv_all_full_bytes: kv_all_full,
        activation_bytes: activations(request, context)?,
        plans,
    })
}

fn activations(request: &MemoryRequest<'_>, context: usize) -> Result<Option<u64>, ProfileError> {
    let precision = match request.kv {
        KvElement::F32 => "fp32",
        KvElement::F16 => "fp16",
        KvElement::I16 | KvElement::I8 => "w8a16",
        KvElement::Q8 => return Ok(None),
    };
    let choice = StepChoice {
        context,
        layout: request.layout,
        precision: precision.to_owned(),
        kv: Some(request.kv),
        gelu: Gelu::Exact,
        head_shards: 1,
    };
    Ok(Some(StepCost::of_choice(request.config, &choice)?.activation_bytes))
}

/// Graphs of consecutive layers, each as long as it can be: no other order has fewer.
fn split(weights: &ModelBytes, kv: &[u64]) -> Result<Vec<GraphPart>, String> {
    let layers = weights.layers.iter().zip(kv).enumerate();
    let units = layers.map(|(layer, (&weights, &kv))| (Some(layer), weights, kv));
    let mut parts: Vec<GraphPart> = Vec::new();
    for (layer, weight_bytes, kv_bytes) in units.chain([(None, weights.head, 0)]) {
        let fits = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes <= GRAPH_LIMIT);
        let unit = weight_bytes.checked_add(kv_bytes);
        if !fits(unit) {
            let what = layer.map_or_else(|| "the head".into(), |layer| format!("layer {layer}"));
            return Err(format!(
                "{what} alone has {weight_bytes} bytes of weights and {kv_bytes} of cache, above \
                 the {GRAPH_LIMIT} of a graph"
            ));
        }
        let end = |first: usize| layer.map_or(first, |layer| layer + 1);
        match parts.last_mut() {
            Some(part)
                if fits(unit.and_then(|unit| {
                    part.weight_bytes.checked_add(part.kv_bytes)?.checked_add(unit)
                })) =>
            {
                part.end_layer = end(part.end_layer);
                part.head = layer.is_none();
                part.weight_bytes += weight_bytes;
                part.kv_bytes += kv_bytes;
            }
            _ => {
                let first_layer = layer.unwrap_or(weights.layers.len());
                parts.push(GraphPart {
                    first_layer,
                    end_layer: end(first_layer),
                    head: layer.is_none(),
                    weight_bytes,
                    kv_bytes,
                });
            }
        }
    }
    Ok(parts)
}

use crate::{CacheLayoutChoice, spec::cache_length};
use firesteel_checkpoint::ModelConfig;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Bytes of the KV cache of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBytes {
    /// With every layer's own cache length.
    pub hybrid: u64,
    /// If every layer kept the whole context.
    pub uniform: u64,
    /// The difference; never negative, because no cache is longer than the context.
    pub saved: u64,
}

/// KV bytes of `layers` of `config` at `context` entries: 2 · kv heads · head_dim · bytes an
/// element for each entry, over sliding layers of min(C, W−1) entries (ring) or min(C, W) (roll)
/// and full layers of C. `None` when a product overflows 64 bits.
pub fn kv_bytes(
    config: &ModelConfig,
    layers: Range<usize>,
    context: usize,
    layout: CacheLayoutChoice,
    bytes_per_element: usize,
) -> Option<KvBytes> {
    let kinds = config.layer_types.get(layers)?;
    let per_entry =
        (config.key_value_size() as u64).checked_mul(2)?.checked_mul(bytes_per_element as u64)?;
    let entries = kinds.iter().try_fold(0u64, |sum, &kind| {
        let length = cache_length(kind, layout.layout(kind), context, config.sliding_window);
        sum.checked_add(length as u64)
    })?;
    let hybrid = entries.checked_mul(per_entry)?;
    let uniform = (kinds.len() as u64).checked_mul(context as u64)?.checked_mul(per_entry)?;
    Some(KvBytes { hybrid, uniform, saved: uniform - hybrid })
}

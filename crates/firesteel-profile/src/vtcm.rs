use crate::memory::GRAPH_LIMIT;
use firesteel_check::audit::Schematic;
use serde::Serialize;

/// Bytes of the tightly coupled memory of the chips that were verified (SM8550 to SM8850).
pub const VTCM_BYTES: u64 = 8 << 20;

/// A graph against the limits of a Hexagon session. What only a compiled graph can tell is `None`
/// for others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SessionGraph {
    /// Name of the graph.
    pub name: String,
    /// Bytes of its weights and its cache inputs.
    pub addressed_bytes: u64,
    /// Bytes that a graph can address.
    pub graph_limit_bytes: u64,
    /// Whether what it addresses is within the limit.
    pub addressable: bool,
    /// Bytes of the tightly coupled memory.
    pub vtcm_limit_bytes: u64,
    /// Bytes of activations and cache entries that the operator with the largest working set reads
    /// and writes. Above the limit it has to be cut.
    pub largest_operator_bytes: Option<u64>,
    /// Its name.
    pub largest_operator: Option<String>,
    /// Whether that working set is within the limit.
    pub largest_operator_fits: Option<bool>,
    /// Bytes of it that the compiler uses.
    pub vtcm_used_bytes: Option<u64>,
    /// Bytes of values between operators that the compiler keeps in memory, because they do not
    /// fit or are wanted late.
    pub memory_values_bytes: Option<u64>,
    /// Bytes that it plans to write to memory beyond what the graph returns. Outputs are rounded up
    /// to whole tiles, which counts here.
    pub spilled_bytes: Option<u64>,
    /// Bytes of the context binary.
    pub context_binary_bytes: Option<u64>,
}

/// What the compiler made of a graph.
#[derive(Debug, Clone, Copy)]
pub struct CompiledGraph<'a> {
    /// Its plan.
    pub schematic: Option<&'a Schematic>,
    /// Bytes of the context binary.
    pub binary_bytes: u64,
    /// Bytes of what the graph returns; `None` where that is not known.
    pub returned_bytes: Option<u64>,
}

impl SessionGraph {
    /// The graph `name`, which addresses `addressed_bytes` and whose operator with the largest
    /// working set is `largest`.
    pub fn new(
        name: String,
        addressed_bytes: u64,
        largest: Option<(&str, u64)>,
        compiled: Option<CompiledGraph<'_>>,
    ) -> Self {
        let schematic = compiled.and_then(|compiled| compiled.schematic);
        Self {
            name,
            addressed_bytes,
            graph_limit_bytes: GRAPH_LIMIT,
            addressable: addressed_bytes <= GRAPH_LIMIT,
            vtcm_limit_bytes: VTCM_BYTES,
            largest_operator_bytes: largest.map(|(_, bytes)| bytes),
            largest_operator: largest.map(|(name, _)| name.to_owned()),
            largest_operator_fits: largest.map(|(_, bytes)| bytes <= VTCM_BYTES),
            vtcm_used_bytes: schematic.and_then(|schematic| schematic.vtcm_bytes),
            memory_values_bytes: schematic.and_then(|schematic| schematic.memory_values_bytes),
            spilled_bytes: compiled.zip(schematic).and_then(|(compiled, schematic)| {
                Some(schematic.total.dram_write.saturating_sub(compiled.returned_bytes?))
            }),
            context_binary_bytes: compiled.map(|compiled| compiled.binary_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_check::audit::Traffic;

    #[test]
    fn what_is_not_compiled_is_not_known() {
        let graph = SessionGraph::new("step".into(), GRAPH_LIMIT + 1, Some(("a", 9 << 20)), None);
        assert!(!graph.addressable);
        assert_eq!(graph.largest_operator_fits, Some(false));
        assert_eq!((graph.vtcm_used_bytes, graph.spilled_bytes), (None, None));
        assert_eq!((graph.memory_values_bytes, graph.context_binary_bytes), (None, None));
    }

    #[test]
    fn what_is_compiled_is_taken_from_the_plan() {
        let schematic = Schematic {
            total: Traffic { dram_write: 1500, ..Traffic::default() },
            vtcm_bytes: Some(7 << 20),
            memory_values_bytes: Some(12),
            ..Schematic::default()
        };
        let compiled = CompiledGraph {
            schematic: Some(&schematic),
            binary_bytes: 99,
            returned_bytes: Some(1000),
        };
        let graph = SessionGraph::new("step".into(), GRAPH_LIMIT, None, Some(compiled));
        assert!(graph.addressable);
        assert_eq!(graph.largest_operator_fits, None);
        assert_eq!((graph.vtcm_used_bytes, graph.spilled_bytes), (Some(7 << 20), Some(500)));
        assert_eq!((graph.memory_values_bytes, graph.context_binary_bytes), (Some(12), Some(99)));
    }
}

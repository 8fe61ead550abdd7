//! Costs counted from graphs, fits of the published times, and operators by group.

use firesteel_check::audit::{NodeTraffic, Schematic, Traffic};
use firesteel_checkpoint::{Checkpoint, LayerKind, ModelConfig, RandomWeights, preset};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, build};
use firesteel_graph::{Graph, Op, Part, Tag};
use firesteel_profile::{
    ElementBits, Estimate, Fit, FitSelection, Group, Grouped, KvElement, ModelBytes, OperatorTime,
    OperatorTimes, PartKind, Provenance, Quantity, StepChoice, StepCost, Table, Term, WeightCoding,
    WhatIf, cache_moves, fit, peak_activations, what_if,
};
use firesteel_step::{CacheLayoutChoice, Logits, kv_bytes};
use firesteel_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

fn spark() -> ModelConfig {
    preset("spark-x2.5-1.7b").unwrap()
}

fn choice(precision: &str) -> StepChoice {
    StepChoice {
        context: 1024,
        layout: CacheLayoutChoice::Auto,
        precision: precision.into(),
        kv: None,
        gelu: Gelu::Exact,
        head_shards: 1,
    }
}

fn selection(precision: &str) -> FitSelection {
    FitSelection { runtime: "qnn-npu".into(), precision: precision.into(), dialect: None }
}

fn galaxy(precision: &str) -> Fit {
    fit(&spark(), &Table::galaxy_s25().unwrap(), &selection(precision)).unwrap()
}

/// Weights are what `WeightCount` says and caches what the contract says, in every format.
#[test]
fn counted_bytes_are_those_of_the_contract() {
    for model in ["spark-x2.5-1.7b", "spark-x2.5-4b"] {
        let config = preset(model).unwrap();
        for (precision, coding) in [
            ("fp16", WeightCoding::F16),
            ("w8a16", WeightCoding::Int8PerRow),
            ("w4a16", WeightCoding::Int4PerRow),
        ] {
            for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
                for context in [64, 1024, 1 << 20] {
                    let choice = StepChoice { context, layout, ..choice(precision) };
                    let cost = StepCost::of_choice(&config, &choice).unwrap();
                    let case = format!("{model} {precision} {layout:?} {context}");
                    let weights = ModelBytes::coded(&config, false, coding).unwrap();
                    assert_eq!(cost.total.weight_bytes, weights.total(), "{case}");
                    let elements = kv_bytes(&config, 0..config.num_layers(), context, layout, 1);
                    let read = 2 * elements.unwrap().hybrid;
                    assert_eq!(cost.total.cache_read_bytes, read, "{case}");
                    // A rolled window is returned whole; of the others one entry is new.
                    let returned = |kind: LayerKind| {
                        let layers = config.layer_types.iter().filter(|k| **k == kind).count();
                        let rolled =
                            layout == CacheLayoutChoice::Roll && kind == LayerKind::Sliding;
                        let entries = if rolled { context.min(512) } else { 1 };
                        (layers * entries * 2 * config.key_value_size() * 2) as u64
                    };
                    let written = returned(LayerKind::Sliding) + returned(LayerKind::Full);
                    assert_eq!(cost.total.cache_written_bytes, written, "{case}");
                }
            }
        }
    }
}

/// The matrices of a token are two operations a weight; attention adds four for each key and
/// query element.
#[test]
fn operations_of_the_matrices() {
    let config = spark();
    let at = |context: usize| {
        let choice = StepChoice { context, ..choice("fp16") };
        StepCost::of_choice(&config, &choice).unwrap()
    };
    let matrices = 2 * (28 * 51_396_608 + 2048 * 131_072u64);
    let attention = |context: u64| 4 * 2048 * (21 * 512 + 7 * (context + 1));
    for context in [1024, 4096] {
        let cost = at(context as usize);
        let products = matrices + attention(context);
        let rest = cost.total.operations - products;
        // Norms, rotation, masks and activations are a thousandth of it.
        assert!(rest > 0 && rest < products / 500, "{rest} of {products}");
    }
    let more = 4 * 2048 * 7 * 3072;
    // Each further key also has a mask and a softmax in every head.
    let element_wise = 2 * 8 * 7 * 3072;
    assert_eq!(at(4096).total.operations - at(1024).total.operations, more + element_wise);
}

#[test]
fn parts_and_what_is_in_them() {
    let cost = StepCost::of_choice(&spark(), &choice("w8a16")).unwrap();
    let parts: Vec<_> = cost.parts.iter().map(|part| (part.kind, part.count)).collect();
    assert_eq!(parts, [(PartKind::Sliding, 21), (PartKind::Full, 7), (PartKind::Head, 1)]);
    // The compiler planned to read 52.4 MB for such a layer.
    let sliding = cost.parts[0].cost.memory_bytes();
    assert!((52_000_000..53_000_000).contains(&sliding), "{sliding}");
    // Two halves of a full layer's keys: the cache as it is and transposed.
    let largest = cost.largest_operator.unwrap();
    assert_eq!(largest.node, "layers.3.attention.keys_transposed/Transpose");
    assert_eq!(largest.bytes, 2 * 1025 * 2 * 256 * 2);
    let sharded = StepChoice { head_shards: 8, ..choice("w8a16") };
    let sharded = StepCost::of_choice(&spark(), &sharded).unwrap();
    assert_eq!(sharded.parts[2].count, 8);
    // Each part of the head has a norm of its own.
    assert_eq!(sharded.total.weight_bytes - cost.total.weight_bytes, 7 * 2048 * 2);
    let none = StepChoice { head_shards: 0, ..choice("w8a16") };
    let layers = StepCost::of_choice(&spark(), &none).unwrap();
    assert_eq!(layers.parts.len(), 2);
    let time = Estimate::new(layers, Some(&galaxy("w8a16"))).time.unwrap();
    assert_eq!(time.tokens_per_second, None);
}

/// A graph counts the same as the choice that it was exported with.
#[test]
fn a_graph_is_counted_like_its_choice() {
    let config = spark().with_layers(8).unwrap();
    let checkpoint = Checkpoint::random(config.clone(), RandomWeights::default());
    for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
        let options = ExportOptions {
            tokens: 1,
            context: 700,
            layers: 2..8,
            cache_layout: layout,
            logits: Logits::Last,
            gelu: Gelu::Exact,
            precision: Precision::Fp16,
            dialect: Dialect::Qnn,
            head_shards: 1,
        };
        let step = build(&checkpoint, &options).unwrap();
        let kinds = &config.layer_types[2..8];
        let counted = StepCost::of_graphs(&[step.graph], kinds, 2).unwrap();
        let slice = ModelConfig { layer_types: kinds.to_vec(), ..config.clone() };
        let choice = StepChoice { context: 700, layout, ..choice("fp16") };
        let chosen = StepCost::of_choice(&slice, &choice).unwrap();
        for (own, other) in counted.parts.iter().zip(&chosen.parts) {
            assert_eq!((own.kind, own.count), (other.kind, other.count));
            assert_eq!(own.cost.weight_bytes, other.cost.weight_bytes);
            assert_eq!(own.cost.cache_read_bytes, other.cost.cache_read_bytes);
            assert_eq!(own.cost.cache_written_bytes, other.cost.cache_written_bytes);
            assert_eq!(own.cost.moved_bytes, other.cost.moved_bytes);
            assert_eq!(own.cost.operations, other.cost.operations);
            assert_eq!(own.cache_moves_bytes, other.cache_moves_bytes);
        }
    }
}

/// The published times of 8-bit layers and head are those of a memory of some 70 GB/s, as the
/// compiler's traffic beside them says too.
#[test]
fn the_published_times_are_fitted() {
    let w8a16 = galaxy("w8a16");
    assert_eq!(w8a16.rows.len(), 3);
    assert!(!w8a16.timing_only);
    let memory = w8a16.terms[0].value.unwrap();
    assert!((65.0..75.0).contains(&memory), "{memory}");
    assert!(w8a16.max_percent < 4.0, "{}", w8a16.max_percent);
    for row in &w8a16.rows {
        let error = 100.0 * (row.fitted_ms / row.measured_ms - 1.0);
        assert!((row.error_percent - error).abs() < 1e-9);
        assert!(row.error_percent.abs() <= w8a16.max_percent);
    }
    // Two terms are all that three rows carry.
    let used = w8a16.terms.iter().filter(|term| term.value.is_some());
    assert_eq!(used.map(|term| term.term).collect::<Vec<_>>(), [Term::Memory, Term::Moved]);
    assert_eq!(w8a16.terms[3].left_out, Some("too few rows"));

    let w4a16 = galaxy("w4a16");
    assert!(w4a16.timing_only);
    assert_eq!(w4a16.rows.len(), 5);
    assert!(w4a16.left_out_rms_percent.unwrap() >= w4a16.rms_percent.unwrap());
    // One row is a bandwidth, and its error says nothing.
    let one = galaxy("w16a16");
    assert_eq!((one.rows.len(), one.rms_percent, one.left_out_rms_percent), (1, None, None));
}

#[test]
fn a_step_is_estimated_near_what_was_published() {
    let fit = galaxy("w8a16");
    let cost = StepCost::of_choice(&spark(), &choice("w8a16")).unwrap();
    let estimate = Estimate::new(cost, Some(&fit));
    let time = estimate.time.unwrap();
    assert_eq!(time.basis, Provenance::Estimated);
    // 27.36 ms, composed of the measured layers and the head.
    assert!((time.step_ms / 27.36 - 1.0).abs() < 0.03, "{}", time.step_ms);
    let parts: f64 = time.parts.iter().map(|part| part.count as f64 * part.ms).sum();
    assert_eq!(time.tokens_per_second, Some(1000.0 / time.step_ms));
    let groups: f64 = time.groups.iter().map(|group| group.ms).sum();
    assert!((parts / time.step_ms - 1.0).abs() < 1e-9, "{parts}");
    assert!((groups / time.step_ms - 1.0).abs() < 1e-6, "{groups}");
    assert!(time.parts.iter().all(|part| part.beyond.is_empty()));
    // Other shapes on the same device, and contexts beyond all rows.
    let large = preset("spark-x2.5-4b").unwrap();
    let cost = StepCost::of_choice(&large, &StepChoice { context: 32768, ..choice("w8a16") });
    let time = Estimate::new(cost.unwrap(), Some(&fit)).time.unwrap();
    let full = time.parts.iter().find(|part| part.kind == PartKind::Full).unwrap();
    assert!(full.beyond.iter().any(|reason| reason.starts_with("moved ")), "{:?}", full.beyond);
}

#[test]
fn what_the_compiler_plans_takes_the_place_of_the_count() {
    let kinds = [LayerKind::Sliding, LayerKind::Full];
    // Whatever they are called.
    let node = |layer, part, read: u64| NodeTraffic {
        node: format!("node {read}"),
        tag: Some(Tag { layer, part }),
        operator: Some("Gemm".into()),
        traffic: Traffic { dram_read: read, dram_write: 1, ..Traffic::default() },
    };
    let schematic = Schematic {
        nodes: vec![
            node(Some(4), Part::MlpUp, 100),
            node(Some(5), Part::MlpUp, 200),
            node(None, Part::Vocabulary, 300),
            node(None, Part::Border, 9),
        ],
        ..Schematic::default()
    };
    let config = ModelConfig { layer_types: kinds.to_vec(), ..spark() };
    let cost = StepCost::of_choice(&config, &choice("w8a16")).unwrap();
    let cost = cost.with_schematics([&schematic], &kinds, 4);
    let planned: Vec<_> = cost.parts.iter().map(|part| part.compiled_memory_bytes).collect();
    assert_eq!(planned, [Some(106), Some(206), Some(301)]);
    let time = Estimate::new(cost, Some(&galaxy("w8a16"))).time.unwrap();
    assert!(time.compiled_step_ms.unwrap() < time.step_ms);
    let grouped = Grouped::of_memory_traffic(&schematic, "plan".into());
    assert_eq!((grouped.total, grouped.provenance), (613.0, Provenance::Compiled));
    assert_eq!(grouped.groups[0].group, Group::Mlp);
}

#[test]
fn alternatives_differ_in_one_thing() {
    let what = WhatIf { contexts: vec![1024, 4096], selection: selection("w8a16") };
    let table = Table::galaxy_s25().unwrap();
    let all = what_if(&spark(), &table, &choice("w8a16"), &what).unwrap();
    let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "base",
            "layout roll",
            "context 4096",
            "precision fp16",
            "precision w4a16",
            "precision w16a16",
            "precision w8a8",
            "gelu tanh",
            "gelu sigmoid",
            "head in 8",
            "kv i8"
        ]
    );
    let base = all[0].step_ms.unwrap();
    assert_eq!(all[0].difference_ms, Some(0.0));
    for one in &all {
        let difference = one.step_ms.unwrap() - base;
        assert_eq!(one.difference_ms, Some(difference), "{}", one.name);
        assert_eq!(one.difference, Some(difference / base), "{}", one.name);
    }
    let ms = |name: &str| all.iter().find(|one| one.name == name).unwrap().difference_ms.unwrap();
    assert!(ms("layout roll") > 0.0 && ms("context 4096") > 0.0 && ms("kv i8") < 0.0);
    // Nothing but the number of graphs changes what a head of several graphs moves.
    assert!(ms("head in 8").abs() < 0.02);
    // A model of another shape on the same device; a runtime with one precision.
    let large = preset("spark-x2.5-4b").unwrap();
    let what = WhatIf {
        contexts: Vec::new(),
        selection: FitSelection { runtime: "cpu".into(), ..selection("fp16") },
    };
    let all = what_if(&large, &table, &choice("fp16"), &what).unwrap();
    assert!(all.iter().all(|one| one.choice.precision == "fp16" && one.step_ms.is_none()));
    let reason = all[0].missing.as_ref().unwrap();
    assert!(reason.contains("precision is fp16") && reason.contains("accepted: int8"), "{reason}");
}

#[test]
fn the_rolled_window_moves_more() {
    let moves = cache_moves(&spark(), &choice("w4a16")).unwrap().unwrap();
    assert!(moves.roll_share > moves.ring_share, "{moves:?}");
    // Joined and cut: the window in and out of a Slice, for keys and values.
    assert!(moves.roll_bytes - moves.ring_bytes >= 2 * 2 * 512 * 2 * 256 * 2, "{moves:?}");
    let config = ModelConfig { layer_types: vec![LayerKind::Full], ..spark() };
    assert_eq!(cache_moves(&config, &choice("w4a16")).unwrap(), None);
}

#[test]
fn refusals() {
    let table = Table::galaxy_s25().unwrap();
    for (selection, part) in [
        (selection("fp8"), "precision is fp8, of which the table of Samsung Galaxy S25 has no row"),
        (FitSelection { runtime: "gpu".into(), ..selection("fp16") }, "accepted: cpu, ort-npu"),
        (FitSelection { dialect: Some("qnn".into()), ..selection("fp16") }, "none named"),
        (
            FitSelection { runtime: "cpu".into(), ..selection("int8") },
            "accepted: fp32, fp16, or w4",
        ),
    ] {
        let error = fit(&spark(), &table, &selection).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    for (precision, kv, part) in [
        ("w8a4", None, "w4, w8 or w16 followed by a8 or a16"),
        ("w08a16", None, "w4, w8 or w16"),
        ("", None, "precision is \"\""),
        ("w8a16", Some(KvElement::Q8), "q8 with w8a16; accepted: i16, i8"),
        ("w8a8", Some(KvElement::I16), "i16 with w8a8; accepted: i8"),
        ("fp16", Some(KvElement::I8), "i8 with fp16; accepted: f16"),
    ] {
        let error = ElementBits::named(precision, kv).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let zero = StepChoice { context: 0, ..choice("fp16") };
    assert!(StepCost::of_choice(&spark(), &zero).unwrap_err().to_string().contains("context is 0"));
    // A table whose shape no model has.
    let mut value: Value =
        serde_json::from_str(include_str!("../../tables/galaxy-s25.json")).unwrap();
    value["model"]["num_key_value_heads"] = json!(3);
    let table = Table::from_json(Path::new("t.json"), value.to_string().as_bytes()).unwrap();
    let error = fit(&spark(), &table, &selection("fp16")).unwrap_err().to_string();
    assert!(
        error.contains("the table's model") && error.contains("num_key_value_heads"),
        "{error}"
    );
}

/// Names of our nodes as tools spell them, and names of others.
#[test]
fn operators_have_groups() {
    for (name, operator, group) in [
        ("layers.0.mlp.up/Gemm", None, Group::Mlp),
        ("layers.27.mlp.gate/Gemm_kernel_time", None, Group::Mlp),
        ("layers.3.mlp.gelu/Gelu", Some("Gelu"), Group::Gelu),
        ("layers_3_mlp_gelu_erf_Erf", None, Group::Gelu),
        ("layers.3.attention.qkv/Gemm:OpId_21 (cycles)", None, Group::Projections),
        ("layers.3.attention.parts/Split", None, Group::Projections),
        ("layers.3.attention.gate_rows/Gemm", None, Group::Projections),
        ("layers.3.attention.gate_sigmoid/Sigmoid", None, Group::Attention),
        ("layers.3.attention.out/Gemm", None, Group::Projections),
        ("layers.3.attention.out_rows/Reshape", None, Group::Attention),
        ("layers.3.attention.scores/MatMul", None, Group::AttentionProducts),
        ("layers.3.attention.mixed/MatMul", None, Group::AttentionProducts),
        ("layers.3.attention.weights/Softmax", None, Group::Attention),
        ("layers.3.attention.k_rope.along/Mul", None, Group::Attention),
        ("layers.3.attention.keys/Concat", None, Group::CacheMoves),
        ("layers.3.attention.keys_transposed/Transpose", None, Group::CacheMoves),
        ("k_new_12/Slice", None, Group::CacheMoves),
        ("k_new_12", Some("StridedSlice"), Group::CacheMoves),
        ("v_new_12", Some("Slice"), Group::CacheMoves),
        ("k_new_12/Add", None, Group::Attention),
        ("layers.3.attention.norm/RMSNormalization", None, Group::Norms),
        ("head.norm/RMSNormalization", None, Group::Norms),
        ("head_2.head.norm/RMSNormalization", None, Group::Norms),
        ("layers.3.residual/Add", None, Group::Residual),
        ("layers.3.attention.residual/Add", None, Group::Residual),
        ("logits/Gemm", None, Group::Head),
        ("logits_7/Gemm", None, Group::Head),
        ("x_rows/Reshape", None, Group::GraphInputOutput),
        ("(border)", None, Group::GraphInputOutput),
        ("Input OpId_2 (cycles)", None, Group::GraphInputOutput),
        ("Output OpId_3 (cycles)", None, Group::GraphInputOutput),
        ("layers.1.mlp.up.q/QuantizeLinear", None, Group::Conversions),
        ("layers.1.mlp.up", Some("Convert"), Group::Conversions),
        ("v_new_3.real/DequantizeLinear_2", None, Group::Conversions),
        ("mlp_upper", None, Group::Other),
        ("layers.x.mlp.up", None, Group::Other),
        ("/model/layers.0/self_attn/MatMul", None, Group::Other),
        ("", None, Group::Other),
    ] {
        assert_eq!(Group::of(name, operator), group, "{name} {operator:?}");
    }
}

#[test]
fn nothing_is_dropped() {
    let operator = |name: &str, amount: f64| OperatorTime {
        name: name.into(),
        operator: None,
        unit: None,
        amount,
    };
    let times = OperatorTimes {
        quantity: Quantity::Cycles,
        provenance: Provenance::Imported,
        source: "a report".into(),
        operators: vec![
            operator("layers.0.mlp.up/Gemm", 60.0),
            operator("who knows", 30.0),
            operator("layers.0.mlp.down/Gemm", 10.0),
        ],
    };
    let grouped = Grouped::of(&times);
    assert_eq!((grouped.quantity, grouped.total), (Quantity::Cycles, 100.0));
    let found: Vec<_> = grouped.groups.iter().map(|g| (g.group, g.operators, g.share)).collect();
    assert_eq!(found, [(Group::Mlp, 2, 0.7), (Group::Other, 1, 0.3)]);
    assert_eq!(grouped.share(Group::Norms), 0.0);
    let empty = Grouped::of(&OperatorTimes { operators: Vec::new(), ..times });
    assert_eq!((empty.total, empty.groups.len()), (0.0, 0));
}

#[test]
fn activations_live_from_their_node_to_their_last_reader() {
    let mut graph = Graph::new("hand");
    let x = graph.input("x", DType::F32, vec![1, 4]).unwrap();
    let cache = graph.input("k_cache_0", DType::F32, vec![8, 4]).unwrap();
    let doubled = graph.add(Op::Add, &[x, x], "doubled").unwrap();
    let flat = graph.add(Op::Reshape { shape: vec![4] }, &[doubled], "flat").unwrap();
    let squared = graph.add(Op::Mul, &[flat, flat], "squared").unwrap();
    let late = graph.add(Op::Add, &[squared, x], "late").unwrap();
    graph.set_tag(Some(Tag { layer: None, part: Part::Cache }));
    let joined = graph.add(Op::Concat { axis: 0 }, &[cache, late], "joined").unwrap();
    graph.output(joined).unwrap();
    // x, doubled and squared, then x, squared and late: 48 bytes. At the end late (16 bytes) and
    // joined (9 · 16): its input that is a cache does not count, and flat is where doubled is.
    assert_eq!(peak_activations(&graph, None).unwrap(), 16 + 9 * 16);
    let bits = ElementBits { weights: 8, activations: 16, cache: 8 };
    // Joined with a cache, late and joined are entries of one.
    assert_eq!(peak_activations(&graph, Some(bits)).unwrap(), 4 + 9 * 4);
}

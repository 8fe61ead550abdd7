//! Runners against each other and against the float64 forward of the trained model.

use crate::support::{
    Golden, advance, export_to, golden_path, options, ort, snr, spark_tiny, widened,
};
use firesteel_artifact::{Artifact, EvaluatorRunner, HeadRunner};
use firesteel_checkpoint::{Checkpoint, Family, LayerKind, ModelConfig, RandomWeights, Rope};
use firesteel_engine::{CheckpointEmbedding, Engine, EngineOptions};
use firesteel_export::{Dialect, ExportOptions, Precision};
use firesteel_graph::{Constant, Evaluator, Graph, Op, Value, ValueId};
use firesteel_step::{
    CacheLayoutChoice, KvState, Logits, Role, Runner, StepInputs, StepOptions, StepSpec,
};
use firesteel_tensor::{DType, Tensor, TensorView};
use firesteel_testing::Numbers;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// Logits of `ids`, one after the other.
fn logits(runner: &mut dyn Runner, checkpoint: &Arc<Checkpoint>, ids: &[u32]) -> Vec<f32> {
    let spec = runner.spec().clone();
    let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
    let mut state = KvState::new(&spec).unwrap();
    let mut all = Vec::new();
    for id in ids {
        let outputs = advance(runner, &embedding, &mut state, &[*id]);
        all.extend_from_slice(&outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap());
    }
    all
}

fn engine(checkpoint: &Arc<Checkpoint>, spec: &StepSpec) -> impl Runner {
    Engine::new(Arc::clone(checkpoint), EngineOptions::default()).runner(spec.clone()).unwrap()
}

#[test]
fn runners_agree_on_the_trained_model_past_the_window() {
    let checkpoint = Arc::new(Checkpoint::open(&spark_tiny()).unwrap());
    let golden = Golden::open(&golden_path("spark-tiny.safetensors"));
    let folder = tempfile::tempdir().unwrap();
    let export = |name: &str, dialect, precision| {
        let options = ExportOptions { context: 300, dialect, precision, ..options(&checkpoint) };
        export_to(&checkpoint, options, &folder.path().join(name))
    };
    for text in ["0", "1"] {
        let ids = golden.ids(&format!("ids.{text}"));
        assert!(ids.len() > 4 * 64, "past the window");
        let reference = widened(&golden.f32(&format!("logits.{text}")));
        let check = |runner: &mut dyn Runner, what: &str, bar: f64| {
            let db = snr(&reference, &logits(runner, &checkpoint, &ids));
            assert!(db >= bar, "{what} on text {text}: {db:.1} dB, the bar is {bar}");
        };
        for dialect in [Dialect::Portable, Dialect::Qnn] {
            let whole = |precision| {
                let name = format!("{dialect}-{precision:?}");
                let path = folder.path().join(&name);
                Artifact::open(&path).unwrap_or_else(|_| export(&name, dialect, precision))
            };
            let full = whole(Precision::Fp32);
            if dialect == Dialect::Portable {
                check(&mut engine(&checkpoint, &full.manifest().step), "engine", 130.0);
            }
            check(full.evaluator(false).unwrap().as_mut(), &format!("{dialect} evaluator"), 130.0);
            check(&mut ort(&full), &format!("{dialect} ort"), 120.0);
            let half = whole(Precision::Fp16);
            let what = format!("{dialect} fp16 evaluator");
            check(half.evaluator(false).unwrap().as_mut(), &what, 55.0);
            check(&mut ort(&half), &format!("{dialect} fp16 ort"), 55.0);
        }
    }
}

/// Sum of squares of 64 values of 1e4: far above 65504, the largest half.
const LARGE: f32 = 1e4;

#[test]
fn half_precision_norms_survive_large_activations() {
    let checkpoint = Arc::new(Checkpoint::open(&golden_path("spark/mini")).unwrap());
    let folder = tempfile::tempdir().unwrap();
    for dialect in [Dialect::Portable, Dialect::Qnn] {
        let options = ExportOptions {
            layers: 0..1,
            logits: Logits::Hidden,
            precision: Precision::Fp16,
            dialect,
            ..options(&checkpoint)
        };
        let artifact = export_to(&checkpoint, options, &folder.path().join(dialect.to_string()));
        let spec = artifact.manifest().step.clone();
        let mut half: Vec<Box<dyn Runner>> =
            vec![artifact.evaluator(false).unwrap(), Box::new(ort(&artifact))];
        let wide = StepOptions {
            layers: 0..1,
            logits: Logits::Hidden,
            ..StepOptions::decode(checkpoint.config(), spec.context)
        };
        let wide = StepSpec::new(checkpoint.config(), &wide).unwrap();
        // Every channel large, one channel large, and a row so small that epsilon matters.
        let rows: [&dyn Fn(usize) -> f32; 4] = [
            &|i| if i % 2 == 0 { LARGE } else { -0.7 * LARGE },
            &|i| if i == 5 { 6.0 * LARGE } else { 0.01 * i as f32 },
            &|i| 1e-4 * (i as f32 - 30.0),
            &|i| 2e-3 * (i as f32 - 30.0),
        ];
        for (case, row) in rows.iter().enumerate() {
            let x: Vec<f32> = (0..spec.hidden_size).map(row).collect();
            let keys = |runner: &mut dyn Runner| {
                let spec = runner.spec().clone();
                let state = KvState::new(&spec).unwrap();
                let step = state.prepare(&spec, &x).unwrap();
                let outputs = runner.step(&state.inputs(&spec, &step).unwrap()).unwrap();
                outputs.get(&spec, Role::KeyNew(0)).unwrap().view().to_f32().unwrap().into_owned()
            };
            let reference = widened(&keys(&mut engine(&checkpoint, &wide)));
            for runner in &mut half {
                let db = snr(&reference, &keys(runner.as_mut()));
                let name = runner.name();
                assert!(db >= 50.0, "{dialect} {name} case {case}: {db:.1} dB");
            }
        }
    }
}

#[test]
fn the_trap_is_real() {
    // The usual spelling in half precision: finite, plausible, and wrong.
    let mut graph = Graph::new("naive");
    let x = graph.input("x", DType::F16, vec![1, 64]).unwrap();
    let square = graph.add(Op::Mul, &[x, x], "square").unwrap();
    let mean = graph.add(Op::ReduceMean { axis: 1 }, &[square], "mean").unwrap();
    let epsilon = Tensor::from_f32_as(DType::F16, vec![], vec![1e-6]).unwrap();
    let epsilon =
        graph.add_constant("epsilon", DType::F16, vec![], Constant::Tensor(epsilon)).unwrap();
    let sum = graph.add(Op::Add, &[mean, epsilon], "sum").unwrap();
    let root = graph.add(Op::Sqrt, &[sum], "root").unwrap();
    let normed = graph.add(Op::Div, &[x, root], "normed").unwrap();
    graph.output(normed).unwrap();
    let x = Tensor::from_f32_as(DType::F16, vec![1, 64], vec![LARGE; 64]).unwrap();
    let outputs = Evaluator::new(graph).unwrap().run(&[x.view()]).unwrap();
    assert!(outputs[0].view().to_f32().unwrap().iter().all(|v| *v == 0.0));
}

fn small_configs() -> impl Strategy<Value = ModelConfig> {
    let kinds = prop::collection::vec(
        prop::sample::select(vec![LayerKind::Sliding, LayerKind::Full]),
        1..5,
    );
    let shape = (1usize..4, 1usize..4, 1usize..5, 1usize..5, 1usize..5, 3usize..40);
    (kinds, shape, 2usize..9, 1usize..30).prop_map(|(layer_types, shape, window, wide)| {
        let (shared, group, half_width, sliding, full, vocabulary) = shape;
        let head_dim = 2 * half_width;
        let dims = |pairs: usize| 2 * pairs.min(half_width);
        let uses = |kind| layer_types.contains(&kind);
        ModelConfig {
            family: Family::of_model_type("spark2_5").unwrap(),
            hidden_size: 3 * wide,
            intermediate_size: 2 * wide + 1,
            num_attention_heads: shared * group,
            num_key_value_heads: shared,
            head_dim,
            vocab_size: vocabulary,
            sliding_window: uses(LayerKind::Sliding).then_some(window),
            max_position_embeddings: 4096,
            // Of a power of two, which f32 holds exactly.
            rms_norm_eps: 2f64.powi(-20),
            rope_sliding: uses(LayerKind::Sliding).then(|| Rope::plain(1e4, dims(sliding))),
            rope_full: uses(LayerKind::Full).then(|| Rope::plain(5e6, dims(full))),
            layer_types,
            tie_word_embeddings: true,
            dtype: Some(DType::F32),
            eos_token_ids: vec![1],
            bos_token_id: None,
            pad_token_id: None,
        }
    })
}

/// The artifact on the evaluator, each irrational scalar of its graph joined by what f32 cannot
/// hold of it: a model drawn at random may make that last bit as large as an error.
fn with_exact_scalars(artifact: &Artifact) -> Box<dyn Runner> {
    let (step, heads) = artifact.manifest().graphs.split_first().unwrap();
    let spec = artifact.graph_spec(false);
    let exact = [
        ("constant.inverse_root_two", std::f64::consts::FRAC_1_SQRT_2),
        ("constant.query_scale", 1.0 / (spec.head_dim as f64).sqrt()),
    ];
    let read = artifact.read_graph(step).unwrap();
    let mut graph = Graph::new(read.name());
    let mut copies: HashMap<ValueId, ValueId> = HashMap::new();
    for id in read.inputs() {
        let value = read.value(*id);
        copies.insert(*id, graph.input(&value.name, value.dtype, value.shape.clone()).unwrap());
    }
    for (id, constant) in read.constants() {
        let Value { name, dtype, shape } = read.value(id);
        let mut copy = graph.add_constant(name, *dtype, shape.clone(), constant.clone()).unwrap();
        if let Some((_, exact)) = exact.iter().find(|(end, _)| name.ends_with(end)) {
            let Constant::Tensor(stored) = constant else { panic!("{name} is not at hand") };
            let stored = stored.view().to_f32().unwrap()[0];
            assert_eq!(stored, *exact as f32, "{name}");
            let rest = Tensor::from_f32(vec![], vec![(exact - f64::from(stored)) as f32]).unwrap();
            let rest = Constant::Tensor(rest);
            let rest = graph.add_constant(format!("{name}.rest"), *dtype, vec![], rest).unwrap();
            copy = graph.add(Op::Add, &[copy, rest], format!("{name}.exact")).unwrap();
        }
        copies.insert(id, copy);
    }
    for node in read.nodes() {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|id| copies[id]).collect();
        let names = node.outputs.iter().map(|id| read.value(*id).name.clone()).collect();
        let made = graph.add_node(&node.name, node.op.clone(), &inputs, names).unwrap();
        copies.extend(node.outputs.iter().copied().zip(made));
    }
    for id in read.outputs() {
        graph.output(copies[id]).unwrap();
    }
    let heads = heads.iter().map(|head| {
        let head = Evaluator::new(artifact.read_graph(head).unwrap()).unwrap();
        let run = move |hidden: TensorView<'_>| Ok(head.run(&[hidden]).unwrap().remove(0));
        Box::new(run) as HeadRunner
    });
    let runner = EvaluatorRunner::new(graph, spec).unwrap();
    artifact.join(Box::new(runner), heads.collect()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_small_model_exports_to_what_the_engine_computes(
        config in small_configs(),
        layout in prop::sample::select(vec![
            CacheLayoutChoice::Auto, CacheLayoutChoice::Ring, CacheLayoutChoice::Roll,
        ]),
        dialect in prop::sample::select(vec![Dialect::Portable, Dialect::Qnn]),
        tokens in 1usize..12,
        context in 12usize..30,
        all in any::<bool>(),
        shards in 1usize..3,
        seed in any::<u64>(),
    ) {
        let weights = RandomWeights { dtype: DType::F32, seed, outliers: false };
        let layers = 0..config.num_layers();
        let hidden = config.hidden_size;
        // Between a step and the parts of its head the hidden state is rounded to f32, which shows
        // in logits that are all small, as a few of them may be.
        let shards = if config.vocab_size < 8 { 1 } else { shards };
        let checkpoint = Arc::new(Checkpoint::random(config, weights));
        let folder = tempfile::tempdir().unwrap();
        let options = ExportOptions {
            tokens,
            context,
            layers,
            cache_layout: layout,
            logits: if all { Logits::All } else { Logits::Last },
            dialect,
            head_shards: shards,
            ..options(&checkpoint)
        };
        let artifact = export_to(&checkpoint, options, &folder.path().join("a"));
        let spec = artifact.manifest().contract().unwrap();
        let mut left = engine(&checkpoint, &spec);
        let mut right = with_exact_scalars(&artifact);
        let mut state = KvState::new(&spec).unwrap();
        let mut numbers = Numbers::new(seed);
        while state.position() + tokens <= context {
            let x = numbers.units(tokens * hidden);
            // From the same caches, because a model drawn at random may make a last bit of them large.
            let step = state.prepare(&spec, &x).unwrap();
            let inputs: StepInputs<'_> = state.inputs(&spec, &step).unwrap();
            let reference = left.step(&inputs).unwrap();
            let test = right.step(&inputs).unwrap();
            for (output, (r, t)) in
                spec.outputs.iter().zip(reference.tensors().iter().zip(test.tensors()))
            {
                let r = widened(&r.view().to_f32().unwrap());
                let db = snr(&r, &t.view().to_f32().unwrap());
                prop_assert!(db >= 120.0, "{}: {db:.1} dB", output.name);
            }
            state.commit(&spec, step, &reference).unwrap();
        }
    }
}

use crate::calibrate::moves;
use crate::rewrite::{constant, constant_f32, range_of};
use crate::{QuantizeError, Quantized};
use firesteel_export::StepGraphs;
use firesteel_graph::{Evaluator, Graph, Op, ValueId};
use firesteel_step::{
    Embedding, EncodedRunner, Encoding, KvState, Role, Runner, RunnerError, StepInputs,
    StepOutputs, StepSpec,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A step in floats and what became of it.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// In floats.
    pub float: &'a StepGraphs,
    /// Quantized.
    pub quantized: &'a Quantized,
}

/// One value of one step on both sides.
#[derive(Debug)]
pub struct Compared<'a> {
    /// Name of the value in the graph of floats.
    pub name: &'a str,
    /// In floats.
    pub float: &'a [f32],
    /// Quantized.
    pub quantized: &'a [f32],
    /// What it can be without being clipped to its integers; `None` where it has none.
    pub held: Option<[f32; 2]>,
}

/// Runs both graphs of `pair` over `texts`, each from empty caches, which either graph has of its
/// own, and shows `visit` every computed value of every step. Tokens that do not fill a step are left
/// out.
///
/// # Errors
/// When the slice does not begin with the embeddings, a graph cannot be run, or a text does not fit
/// the context.
pub fn compare(
    pair: Pair<'_>,
    embedding: &dyn Embedding,
    texts: &[&[u32]],
    visit: &mut dyn FnMut(Compared<'_>),
) -> Result<(), QuantizeError> {
    let Pair { float, quantized } = pair;
    if float.spec.first_layer > 0 {
        return Err(QuantizeError::Option {
            option: "--check-text",
            value: String::new(),
            problem: "the slice does not begin with the embeddings of a text".into(),
        });
    }
    let names = watched(&float.graph, &float.spec);
    let mut sides = [
        Side::new(float, &names, float.spec.clone(), &[])?,
        Side::new(&quantized.graphs, &names, quantized.graphs.spec.clone(), &quantized.ports)?,
    ];
    let held = held(quantized)?;
    for text in texts {
        for side in &mut sides {
            side.state = KvState::new(&side.spec)?;
        }
        for part in text.chunks_exact(float.spec.tokens) {
            let mut x = vec![0.0; part.len() * embedding.hidden_size()];
            embedding.lookup(part, &mut x)?;
            let [left, right] = &mut sides;
            let [left, right] = [left.step(&x)?, right.step(&x)?];
            for (name, float) in &left {
                if let Some((_, quantized)) = right.iter().find(|(other, _)| other == name) {
                    visit(Compared { name, float, quantized, held: held.get(name).copied() });
                }
            }
        }
    }
    Ok(())
}

/// What each value that has integers can be without being clipped, by its name.
fn held(quantized: &Quantized) -> Result<HashMap<String, [f32; 2]>, QuantizeError> {
    let mut held = HashMap::new();
    let mut add = |name: &str, encoding: Encoding| {
        let half = 0.5 * f64::from(encoding.scale);
        let [low, high] = range_of(encoding);
        held.insert(name.to_owned(), [low - half, high + half].map(|end| end as f32));
    };
    let Quantized { graphs, ports, .. } = quantized;
    let graphs = graphs.heads.iter().map(|head| &head.graph).chain([&graphs.graph]);
    for (graph, node) in graphs.flat_map(|graph| graph.nodes().iter().map(move |n| (graph, n))) {
        let (Op::DequantizeLinear { axis: None }, &[_, scale, zero]) = (&node.op, &node.inputs[..])
        else {
            continue;
        };
        let dtype = graph.value(zero).dtype;
        let zero_point = constant(graph, zero)?.view().to_i32()?.first().copied();
        let scale = constant_f32(graph, scale)?.first().copied();
        if let (Some(zero_point), Some(scale)) = (zero_point, scale) {
            let name = &graph.value(node.outputs[0]).name;
            add(name, Encoding { dtype, scale, zero_point });
        }
    }
    ports.iter().for_each(|port| add(&port.name, port.encoding));
    Ok(held)
}

/// Names of the values that are computed; those that masks are added to differ by intent.
fn watched(graph: &Graph, spec: &StepSpec) -> Vec<String> {
    let of_role = spec.inputs.iter().filter(|input| matches!(input.role, Role::Mask(_)));
    let masks: Vec<ValueId> = of_role.filter_map(|input| graph.find(&input.name)).collect();
    let computed = graph
        .nodes()
        .iter()
        .filter(|node| !moves(&node.op) && !node.inputs.iter().any(|id| masks.contains(id)));
    computed.map(|node| graph.value(node.outputs[0]).name.clone()).collect()
}

/// Values of a step, by name.
type Values = Vec<(String, Vec<f32>)>;

/// One of the two graphs and its caches.
struct Side {
    runner: Box<dyn Runner>,
    heads: Vec<Evaluator>,
    spec: StepSpec,
    state: KvState,
    seen: Rc<RefCell<Values>>,
}

impl Side {
    fn new(
        graphs: &StepGraphs,
        names: &[String],
        spec: StepSpec,
        ports: &[firesteel_step::PortEncoding],
    ) -> Result<Self, QuantizeError> {
        let graph = graphs.graph.clone();
        let taps = names.iter().filter_map(|name| Some((graph.find(name)?, name.clone())));
        let taps = taps.filter(|(id, _)| graph.value(*id).dtype.is_float()).collect();
        let seen = Rc::new(RefCell::new(Vec::new()));
        let inner = Tapped {
            spec: spec.clone().with_encodings(ports),
            evaluator: Evaluator::new(graph)?,
            taps,
            seen: Rc::clone(&seen),
        };
        let runner: Box<dyn Runner> = match ports {
            [] => Box::new(inner),
            ports => Box::new(EncodedRunner::new(Box::new(inner), spec.clone(), ports)?),
        };
        let heads = graphs.heads.iter().map(|head| Evaluator::new(head.graph.clone()));
        let heads = heads.collect::<Result<_, _>>()?;
        Ok(Self { runner, heads, state: KvState::new(&spec)?, spec, seen })
    }

    fn step(&mut self, x: &[f32]) -> Result<Values, QuantizeError> {
        self.seen.borrow_mut().clear();
        let step = self.state.prepare(&self.spec, x)?;
        let outputs = self.runner.step(&self.state.inputs(&self.spec, &step)?)?;
        self.state.commit(&self.spec, step, &outputs)?;
        let mut values = self.seen.take();
        for (declared, tensor) in self.spec.outputs.iter().zip(outputs.tensors()) {
            if !values.iter().any(|(name, _)| *name == declared.name) {
                values.push((declared.name.clone(), tensor.view().to_f32()?.into_owned()));
            }
        }
        if let Some(hidden) = outputs.get(&self.spec, Role::Hidden) {
            for head in &self.heads {
                let logits = head.run(&[hidden.view()])?;
                let name = head.graph().outputs().first().map(|id| head.graph().value(*id));
                if let (Some(value), Some(tensor)) = (name, logits.first()) {
                    values.push((value.name.clone(), tensor.view().to_f32()?.into_owned()));
                }
            }
        }
        Ok(values)
    }
}

/// The evaluator, which keeps what some values were.
struct Tapped {
    evaluator: Evaluator,
    spec: StepSpec,
    taps: HashMap<ValueId, String>,
    seen: Rc<RefCell<Values>>,
}

impl Runner for Tapped {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        "evaluator"
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let mut seen = self.seen.borrow_mut();
        let mut tap = |id: ValueId, values: &[f64]| {
            if let Some(name) = self.taps.get(&id) {
                seen.push((name.clone(), values.iter().map(|value| *value as f32).collect()));
            }
        };
        let outputs = self.evaluator.run_tapped(inputs.tensors(), &mut tap);
        let outputs = outputs.map_err(|error| RunnerError::Failed {
            runner: "evaluator".into(),
            message: error.to_string(),
        })?;
        Ok(StepOutputs::new(&self.spec, outputs)?)
    }
}

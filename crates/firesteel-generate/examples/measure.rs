use std::time::Instant;
fn main() {
    let v = 131072usize;
    let mut s = 1u64;
    let mut uni = || { s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); ((s >> 11) as f64 + 0.5) / (1u64 << 53) as f64 };
    let mut normal = |sd: f64| ((-2.0 * uni().ln()).sqrt() * (std::f64::consts::TAU * uni()).cos() * sd) as f32;
    let mut typical: Vec<f32> = (0..v).map(|_| normal(2.2)).collect();
    for r in 0..200 { typical[(r * 7919 + 13) % v] = 21.0 - 1.3 * ((r + 1) as f32).ln() ; }
    let flat = vec![0.0f32; v];
    let wide: Vec<f32> = (0..v).map(|_| normal(1.0)).collect();
    let g = firesteel_generate::SamplingOptions::GREEDY;
    let allowed: Vec<bool> = (0..v).map(|i| i < 130000).collect();
    let show = |name: &str, f: &mut dyn FnMut() -> u32| {
        let mut times: Vec<f64> = (0..2000).map(|_| { let t = Instant::now(); std::hint::black_box(f()); t.elapsed().as_secs_f64() * 1e6 }).collect();
        times.sort_by(f64::total_cmp);
        println!("{name:22} p50 {:7.0} us", times[1000]);
    };
    for (dn, d) in [("typical", &typical), ("flat", &flat), ("normal", &wide)] {
        for (on, t, k, p) in [("greedy", 0.0, 0, 1.0), ("temp1", 1.0, 0, 1.0), ("p95", 1.0, 0, 0.95), ("k50", 1.0, 50, 1.0), ("k50p95", 1.0, 50, 0.95)] {
            let o = firesteel_generate::SamplingOptions { temperature: t, top_k: k, top_p: p, ..g.clone() };
            let mut new = firesteel_generate::Sampler::new(o, v).unwrap().with_allowed(&allowed).unwrap();
            show(&format!("{dn} {on} new"), &mut || new.sample(d).unwrap());
        }
    }
}
